"""How near `tunetool stage` comes to the storage, and for small files to a stream of tar; cp, rsync, rclone beside it.

    .venv/bin/python perf/stage.py [--target DIR] [--memory /dev/shm] [--model 2GB] [--images 200]
    .venv/bin/python perf/stage.py --small 100000 [--small-bytes 4096]

The first copies a model of four files and images of 3 MB from DIR, the second so many small files in directories of a
thousand; then `tunetool stage` once more, to the copy that is there. The source is out of the page cache before each
copy. Seconds of whole processes, Python's start included, with compiled files as in an installed package. fio reads as
many bytes at DIR and writes them to the memory: the slower is what a copy can reach.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

from rounds import Arms, Call, Samples, fio_samples, keep_compiled, output, program, sample, timed
from tunetool.measure import page_cache
from tunetool.node.units import parse_size

IMAGE_BYTES, MODEL_FILES = 3_000_000, 4
OURS = "tunetool stage"


def make(directory: Path, count: int, size: int) -> None:
    """Files of random bytes, so that nothing can compress or deduplicate them."""
    for number in range(count):
        (path := directory / f"{number // 1000:02}/{number:06}").parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))


def prepare(call: Call) -> Arms:
    asked, source = call.asked, call.folder / "data"
    memory = Path(call.held.enter_context(tempfile.TemporaryDirectory(prefix="tunetool-stage-", dir=asked.memory)))
    copy = memory / "copy"
    commands: dict[str, list[object]] = {
        OURS: [sys.executable, "-m", "tunetool", "stage", "--runs-dir", call.folder / "runs", source, copy],
        "cp": ["cp", "-r", source, copy],
    }
    if asked.small:
        make(source, asked.small, asked.small_bytes)
        here, there = shlex.quote(str(source)), shlex.quote(str(copy))
        commands["tar"] = ["sh", "-c", f"mkdir {there} && tar -C {here} -cf - . | tar -C {there} -xf -"]
    else:
        make(source / "model", MODEL_FILES, parse_size(asked.model) // MODEL_FILES)
        make(source / "images", asked.images, IMAGE_BYTES)
        if shutil.which("rsync"):
            commands["rsync"] = ["rsync", "-a", f"{source}/", f"{copy}/"]
        if shutil.which("rclone"):
            commands["rclone"] = ["rclone", "copy", "--transfers", "8", source, copy]
    size, part = page_cache.size_of(source), "small files" if asked.small else "a model"

    def turn(name: str) -> Samples:
        page_cache.drop(source)
        copying, about = partial(output, *commands[name]), partial(sample, engine=name, part=part)
        _, seconds, _ = timed(copying)
        yield about("time", seconds)
        yield about("bandwidth", size / seconds)
        if name == OURS:
            yield about("time", timed(copying)[1], state="there already")
        shutil.rmtree(copy)
        (memory / ".copy.tunetool-stage.json").unlink(missing_ok=True)

    keep_compiled(call.folder)
    list(turn(OURS))  # its compiled files are there then
    fio = partial(fio_samples, call.folder, memory, min(8, 2 * (os.cpu_count() or 1)), size)
    return {name: partial(turn, name) for name in commands} | ({} if asked.small else {"fio": fio})


if __name__ == "__main__":
    program(prepare, memory="/dev/shm", model="2GB", images=200, small=0, small_bytes=4096)
