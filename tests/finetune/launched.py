"""The program of ranks in test_launch.py, and ``control``: a launch in its own process, to be interrupted or killed.

It needs only Python, unless ranks communicate.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tunetool.launch import rank
from tunetool.launch.job import Job

RANK = os.environ.get("RANK", "-")
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OF_TESTS", "TUNETOOL_OUT")


class Said:
    """Progress for tests."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def step(self, name: str, seconds: float) -> contextlib.AbstractContextManager[Callable[[], None]]:
        return contextlib.nullcontext(lambda: None)


def job(directory: Path, *what: str, ranks: int = 2, **more: object) -> Job:
    settings: dict[str, object] = {"timeout": 600.0, "stall": 600.0, **more}
    return Job([__file__, *what], ranks, {"OF_TESTS": "$x 'y' {{ z }}"}, directory, **settings)  # type: ignore[arg-type]


def tell(**more: object) -> None:
    report = {name: os.environ[name] for name in (*NAMES, "TUNETOOL_NODE")}
    path = rank.out() / "told.json"
    path.with_suffix(".new").write_text(
        json.dumps({**report, "host": socket.gethostname(), "started_at": str(rank.started_at), **more})
    )
    path.with_suffix(".new").rename(path)


def leave() -> dict[str, str]:
    """Start a child in its own session, and make a file like those with which torch shares tensors."""
    child = f"7{os.getpid()}"
    subprocess.Popen(["sleep", child], start_new_session=True)
    left = Path(f"/dev/shm/torch_{os.getpid()}_{RANK}_0")
    left.write_bytes(bytes(4096))
    with left.open("r+b") as stream:
        mmap.mmap(stream.fileno(), 4096)
    return {"child": child, "left": str(left)}


@contextlib.contextmanager
def beating() -> Iterator[None]:
    """Send heartbeats while something runs that takes its time; the number of heartbeats does not matter."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.5):
            rank.beat()

    thread = threading.Thread(target=beat)
    thread.start()
    yield
    ended.set()
    thread.join()


def gather(*then: str) -> None:
    with beating():
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([float(RANK)])
        dist.all_reduce(total)
        tell(sum=str(total.item()))
    if RANK == "0":
        for _ in range(10_000):  # longer than the other rank in any test
            rank.beat()
    if RANK == "1" and then == ("away",):
        away()
    if RANK == "1" and then == ("die",):
        os.kill(os.getpid(), signal.SIGKILL)
    if then:
        dist.all_reduce(total)
    dist.destroy_process_group()


def away() -> None:
    time.sleep(600)  # away


def buffers() -> None:
    import deepspeed
    import torch

    # As DeepSpeed's own launcher does: with it, ranks of one machine share memory.
    os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]
    deepspeed.init_distributed("gloo")
    deepspeed.comm.inference_all_reduce(torch.ones(3))
    made = [path.name for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_*")]
    tell(buffers=" ".join(made))
    deepspeed.comm.barrier()
    if RANK == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def compiling(seconds: str) -> None:
    """As torch does where an op is first used: one rank's compiler computes, and no rank beats."""
    if RANK == "1":
        compiler = shutil.copy("/bin/sh", rank.out() / "cc1plus")
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([compiler, "-c", "while :; do :; done"], timeout=float(seconds), check=False)
        Path(compiler).unlink()
    tell()


def control(name: str, inventory: str, directory: str, *what: str) -> int:
    from tunetool.errors import TunetoolError
    from tunetool.launch.choose import launcher

    try:
        launcher(name, Path(inventory) if inventory else None, None, Said()).run(
            job(Path(directory), *what, ranks=2 if name == "local" else 1, python=sys.executable), lambda: None
        )
    except TunetoolError as error:
        print(error.message, error.hint)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return 130
    return 0


def main(what: str, *more: str) -> int:
    if what == "control":
        return control(*more)
    print("I am", RANK)
    if what == "gather":
        gather(*more)
    elif what == "buffers":
        buffers()
    elif what == "compiling":
        compiling(*more)
    else:
        tell(**leave())
        if what == "wait":
            time.sleep(600)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
