"""The health check of a volume that is well, beside fio on it, of a full one, and while every CPU is busy.

Each check is a process of its own, as the timer starts it, on a directory that is a mount point in a namespace of this
test. What a check keeps for the next is removed, so that each one writes its 1 MiB. TUNETOOL_HEALTH_CHECKS: how many, of
each load; docs/guides/health-check.md has the figures of 1,000.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from calls import call
from programs import need_program
from skips import no_mounts
from tunetool.health import results
from tunetool.node.volume.named_volume import describe_volume

pytestmark = pytest.mark.slow  # each check is a process of its own

ROOT = Path(__file__).parents[2]
CHECKS = int(os.environ.get("TUNETOOL_HEALTH_CHECKS", "5"))
CHECK = """
import sys
from pathlib import Path
from tunetool.health.check import check
from tunetool.health.results import Files
settings = {"period_seconds": 900, "measure_seconds": 0, "textfile_directory": "", "ignored_checks": []}
print(check(settings, Files(Path(sys.argv[1]))))
"""
FIO = (
    *("fio", "--name=load", "--rw=randrw", "--bs=128k", "--direct=1", "--ioengine=libaio", "--iodepth=16"),
    *("--numjobs=2", "--size=256M", "--time_based", "--runtime=86400"),
)
FULL = "unproven: filesystem.answers: it is full, so nothing could be written: No space left on device (write)"


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
def loaded(load: str, point: Path) -> Iterator[None]:
    """``point`` is a mount point under that load; in a namespace that ends with this process."""
    (data := point.with_name("data")).mkdir()
    full = load == "full"
    mount = ["-t", "tmpfs", "-o", "size=2m", "none"] if full else ["--bind", str(data)]
    subprocess.run(["mount", *mount, str(point)], check=True)
    if full:
        with contextlib.suppress(OSError), (point / "data").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    spin = [sys.executable, "-c", "while True: pass"]
    loads = {"fio": [[*FIO, f"--directory={point}"]], "busy": [spin] * 2 * (os.cpu_count() or 1)}
    with running(*loads.get(load, [])):
        yield


def checks(load: str, point: Path, node: results.Files) -> Counter[str]:
    """How often each answer came."""
    answers = Counter[str]()
    with loaded(load, point):
        manifest = json.loads((ROOT / "tests/data/machines/built-manifest.json").read_text())
        memory = {"hugepages": [], "shm_bytes": None, "memlock": None}
        volume = {"filesystem": describe_volume(str(point)), "offload_dir": None, "array": None}
        node.manifest.parent.mkdir(parents=True)
        node.manifest.write_text(json.dumps({**manifest, **volume, "memory": memory, "expect": {}}))
        (node.root / "dev").mkdir()
        (node.root / "dev/kmsg").touch()
        for _ in range(CHECKS):
            done = call(sys.executable, "-c", CHECK, node.root)
            result = results.read(node.checked)
            assert result is not None, done.stderr
            answers[": ".join([result.status, *result.failed, *result.doubts])] += 1
            node.checked.unlink()
            node.kept.unlink(missing_ok=True)
    return answers


@pytest.mark.parametrize(("load", "answer"), [("fio", "pass"), ("full", FULL), ("busy", "pass")])
def test_no_load_makes_a_check_fail(tmp_path: Path, load: str, answer: str) -> None:
    need_program("fio", "unshare", "mount")
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if no_mounts():
        pytest.skip("may not make a mount namespace")
    (tmp_path / "volume").mkdir()
    apart = ["unshare", "--mount", "--propagation", "private", sys.executable, __file__, load, tmp_path]
    done = call(*apart, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, timeout=3600)
    assert json.loads(done.stdout) == {answer: CHECKS}, done.stderr


if __name__ == "__main__":
    place = Path(sys.argv[2])
    print(json.dumps(checks(sys.argv[1], place / "volume", results.Files(place / "node"))))
