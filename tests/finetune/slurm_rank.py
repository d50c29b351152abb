"""The program of a rank in the tests' jobs: ``slurm_rank.py reduce|fail|wait``."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from tunetool.launch import rank


def main(what: str) -> int:
    number = int(os.environ["RANK"])
    report = {
        "host": socket.gethostname(),
        "world": int(os.environ["WORLD_SIZE"]),
        "said": os.environ.get("SAID"),
        "slurm": sorted(name for name in os.environ if name.startswith("SLURM")),
        "cpus": len(os.sched_getaffinity(0)),
    }
    if what == "reduce":
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        mine = torch.full((1000,), float(number + 1))
        dist.all_reduce(mine)
        report["sum"] = mine.sum().item()
        dist.destroy_process_group()
    if what == "wait":
        # A file like DeepSpeed's, which DeepSpeed never removes.
        where = f"{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_{number}"
        Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{where}").write_bytes(bytes(4096))
    (rank.out() / "result.json").write_text(json.dumps(report))
    if what == "fail" and number == 1:
        raise RuntimeError("the cable of rank 1 fell out")
    if what in ("fail", "wait"):
        print("waiting", flush=True)
        time.sleep(600)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
