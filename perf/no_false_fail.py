"""Whether the health check fails a volume that is well: beside fio on it, full, and while every CPU is busy.

    sudo .venv/bin/python perf/no_false_fail.py --target DIR [--rounds 1000]

Each check is a process of its own, as the timer starts it, on a directory of DIR that is a mount point in a namespace
of this program. What a check keeps for the next is removed, so that each one writes its 1 MiB: a node's own checks stop
at 100 MiB a day. The full volume is a tmpfs. For each load: how often each verdict came, with its words where it is no
pass, and the slowest check. Ends with 1 where one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from entry import program
from installed import keep_compiled
from tunetool.health import results
from tunetool.node.volume.named_volume import describe_volume

ROOT = Path(__file__).resolve().parents[1]
APART = "TUNETOOL_PERF_MOUNTS"
CHECK = """
import sys
from pathlib import Path
from tunetool.health.check import check
from tunetool.health.results import Files
settings = {"period_seconds": 900, "measure_seconds": 0, "textfile_directory": "", "ignored_checks": []}
print(check(settings, Files(Path(sys.argv[1]))))
"""
FIO = (
    "--rw=randrw --bs=128k --direct=1 --ioengine=libaio --iodepth=16 --numjobs=2 --size=256M",
    "--time_based --runtime=86400",
)


@contextlib.contextmanager
def running(*commands: list[str]) -> Iterator[None]:
    children = [subprocess.Popen(each, stdout=subprocess.DEVNULL, start_new_session=True) for each in commands]
    try:
        time.sleep(1)
        assert all(child.poll() is None for child in children), "a load ended by itself"
        yield
        assert all(child.poll() is None for child in children), "a load ended by itself"
    finally:
        for child in children:
            child.terminate()
            child.wait()


@contextlib.contextmanager
def mounted(point: Path, *arguments: str) -> Iterator[None]:
    point.mkdir()
    subprocess.run(["mount", *arguments, str(point)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


@contextlib.contextmanager
def beside_fio(folder: Path) -> Iterator[Path]:
    (data := folder / "data").mkdir()
    point = folder / "fio"
    command = ["fio", "--name=load", f"--directory={point}", *" ".join(FIO).split()]
    with mounted(point, "--bind", str(data)), running(command):
        yield point


@contextlib.contextmanager
def full(folder: Path) -> Iterator[Path]:
    with mounted(point := folder / "full", "-t", "tmpfs", "-o", "size=2m", "none"):
        with contextlib.suppress(OSError), (point / "data").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        yield point


@contextlib.contextmanager
def busy_cpus(folder: Path) -> Iterator[Path]:
    (data := folder / "idle").mkdir()
    spin = [sys.executable, "-c", "while True: pass"]
    with mounted(point := folder / "busy", "--bind", str(data)), running(*[spin] * 2 * (os.cpu_count() or 1)):
        yield point


def checks(point: Path, rounds: int, node: results.Files) -> tuple[Counter[str], float]:
    """How often each answer came, and the seconds of the slowest."""
    manifest = json.loads((ROOT / "tests/data/machines/built-manifest.json").read_text())
    manifest |= {
        "array": None,
        "filesystem": describe_volume(str(point)),
        "memory": {"hugepages": [], "shm_bytes": None, "memlock": None},
        "offload_dir": None,
        "expect": {},
    }
    node.manifest.parent.mkdir(parents=True)
    node.manifest.write_text(json.dumps(manifest))
    (node.root / "dev").mkdir()
    (node.root / "dev/kmsg").touch()
    answers, slowest = Counter[str](), 0.0
    for _ in range(rounds):
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", CHECK, str(node.root)], capture_output=True, text=True, check=False
        )
        slowest = max(slowest, time.monotonic() - began)
        result = results.read(node.checked)
        if result is None or done.returncode:
            answers[f"broke: {done.stderr.strip()[-200:]}"] += 1
            continue
        answers[": ".join([result.status, *result.failed, *result.doubts])] += 1
        node.checked.unlink()
        node.kept.unlink(missing_ok=True)
    return answers, slowest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=1000)
    options = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("fio") is None:
        parser.error("it needs root, who mounts, and fio")
    if APART not in os.environ:
        apart = ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv]
        os.execvpe(apart[0], apart, {**os.environ, APART: "1"})
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="tunetool-perf-", dir=options.target) as folder:
        keep_compiled(Path(folder) / "compiled")
        for load in (beside_fio, full, busy_cpus):
            with load(Path(folder)) as point:
                answers, slowest = checks(point, options.rounds, results.Files(Path(folder) / f"of-{point.name}"))
            wrong += sum(times for words, times in answers.items() if words.startswith(("fail", "broke")))
            print(f"{point.name}: {options.rounds} checks, the slowest {slowest:.2f} s", flush=True)
            for words, times in answers.most_common():
                print(f"  {times} x {words}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    program(main)
