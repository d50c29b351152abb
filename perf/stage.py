"""How near `tunetool stage` comes to the storage, and for small files to a stream of tar; cp, rsync, rclone beside it.

    .venv/bin/python perf/stage.py [--target DIR] [--memory /dev/shm] [--model 2GB] [--images 200]
    .venv/bin/python perf/stage.py --small 100000 [--small-bytes 4096]

The first copies a model of four files and images of 3 MB from DIR, the second so many small files in 100 directories;
then `tunetool stage` once more, to the copy that is there. The source is out of the page cache before each copy
(posix_fadvise, DONTNEED). Seconds of whole processes, Python's start included, with compiled files as in an installed
package. fio reads as many bytes at DIR and writes them to the memory: the slower is what a copy can reach.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rounds import Arm, Sample, fio_samples, keep_compiled, output, program, sample
from tunetool.node.units import parse_size

IMAGE_BYTES, MODEL_FILES, BLOCK = 3_000_000, 4, 64 * 2**20
OURS = "tunetool stage"


def make(directory: Path, model_bytes: int, images: int) -> int:
    """Write the data; returns its bytes. Random, each block marked, so that nothing can compress or deduplicate it."""
    block = bytearray(os.urandom(BLOCK))
    files = [(f"model/part-{number}.safetensors", model_bytes // MODEL_FILES) for number in range(MODEL_FILES)]
    files += [(f"images/{number:05}.jpg", IMAGE_BYTES) for number in range(images)]
    for count, (name, size) in enumerate(files):
        (path := directory / name).parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb", buffering=0) as stream:
            for at in range(0, size, BLOCK):
                block[:16] = count.to_bytes(8, "little") + at.to_bytes(8, "little")
                stream.write(memoryview(block)[: min(BLOCK, size - at)])
            os.fsync(stream.fileno())
    return sum(size for _, size in files)


def make_small(directory: Path, count: int, size: int) -> int:
    content = os.urandom(size)
    for number in range(count):
        (path := directory / f"{number % 100:02}/{number:06}.txt").parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    os.sync()  # what is not on the disk yet stays in the page cache, whatever is asked for
    return count * size


def cool(directory: Path) -> None:
    """Drop the source from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def prepare(asked: argparse.Namespace, folder: Path, held: ExitStack) -> dict[str, Arm]:
    memory = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="tunetool-stage-", dir=asked.memory)))
    source, copy = folder / "data", memory / "copy"
    if asked.small:
        size = make_small(source, asked.small, asked.small_bytes)
    else:
        size = make(source, parse_size(asked.model), asked.images)
    commands: dict[str, list[object]] = {
        OURS: [sys.executable, "-m", "tunetool", "stage", "--runs-dir", folder / "runs", source, copy],
        "cp": ["cp", "-r", source, copy],
    }
    if asked.small:
        here, there = shlex.quote(str(source)), shlex.quote(str(copy))
        commands["tar"] = ["sh", "-c", f"mkdir {there} && tar -C {here} -cf - . | tar -C {there} -xf -"]
    else:
        more: dict[str, list[object]] = {
            "rsync": ["rsync", "-a", f"{source}/", f"{copy}/"],
            "rclone": ["rclone", "copy", "--transfers", "8", source, copy],
        }
        commands |= {name: argv for name, argv in more.items() if shutil.which(name)}

    def timed(name: str, cold: bool = True) -> float:
        if cold:
            cool(source)
        began = time.perf_counter()
        output(*commands[name])
        return time.perf_counter() - began

    def clean() -> None:
        shutil.rmtree(copy)
        (memory / ".copy.tunetool-stage.json").unlink(missing_ok=True)

    def turn(name: str) -> Iterable[Sample]:
        seconds = timed(name)
        yield sample("time", seconds, engine=name)
        yield sample("bandwidth", size / seconds, engine=name)
        if name == OURS:
            yield sample("time", timed(name, cold=False), engine=name, state="there already")
        clean()

    keep_compiled(folder)
    timed(OURS)  # its compiled files are there then
    clean()
    arms: dict[str, Arm] = {name: partial(turn, name) for name in commands}
    if not asked.small:
        arms["fio"] = lambda: fio_samples(folder, memory, min(8, 2 * (os.cpu_count() or 1)), size)
    return arms


if __name__ == "__main__":
    program(prepare, memory="/dev/shm", model="2GB", images=200, small=0, small_bytes=4096)
