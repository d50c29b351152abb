"""Curves of a real process: sampled here, read back by TensorBoard itself, on a disk that fills up, without libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from calls import call
from programs import need_program
from tunetool.training.rank import gpu_reading
from tunetool.training.rank.curve_files import Curve, gather, read_about, read_curve
from tunetool.training.rank.curves import Curves
from waiting import PATIENCE, until

INTERVAL = 0.1


def curve(directory: Path, name: str) -> Curve:
    read = read_curve(directory / f"series/{name}.csv")
    assert read is not None, name
    return read


def sampled_again(curves: Curves, times: int = 2) -> None:
    """Wait for more samples, by default two: the second one began after this call."""
    before = curves.samples
    until(lambda: curves.samples >= before + times, "samples")


def busy(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Let this process compute, then hold 200 MB, each until samples were taken, however late they come."""
    directory = tmp_path_factory.mktemp("out") / "rank-0"
    with Curves(directory, INTERVAL, rank=0, local_rank=0, device="cpu", started=time.time() - 100) as curves:
        for step in range(5):
            curves.scalar("loss", 1.0 / (step + 1), step)
            curves.scalar("step_time", 0.1, step, "s")
            sampled_again(curves)
        busy(0.5)
        block = b"x" * 200_000_000
        sampled_again(curves)
        del block
    return directory


def test_what_the_process_did_is_in_its_curves(sampled: Path) -> None:
    cpu, memory = curve(sampled, "rank.cpu"), curve(sampled, "rank.memory")
    assert (cpu.unit, memory.unit) == ("%", "B")
    assert len(cpu.values) == read_about(sampled)["samples"] >= 12
    assert min(cpu.values) >= 0, cpu.values
    # However long the machine makes it wait, the area under the curve is the CPU time that it used.
    spent = sum(
        share / 100 * (now - before)
        for share, now, before in zip(cpu.values[1:], cpu.seconds[1:], cpu.seconds, strict=False)
    )
    assert spent > 0.4, cpu
    assert max(memory.values) - min(memory.values) > 150e6
    assert cpu.seconds[0] > 100


def test_the_node_s_curves_are_within_what_a_node_can_have(sampled: Path) -> None:
    assert all(0 <= share <= 100 for share in curve(sampled, "node.cpu").values)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert all(0 < used < total for used in curve(sampled, "node.memory").values)
    assert all(rate >= 0 for rate in curve(sampled, "node.network_in").values)


def test_tensorboard_reads_the_events(sampled: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(sampled / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    names = [path.stem for path in (sampled / "series").glob("*.csv")]
    assert sorted(tags) == sorted(name.replace(".", "/") if "." in name else f"train/{name}" for name in names)
    assert [(point.step, point.value) for point in events.Scalars("train/loss")] == [
        (step, pytest.approx(1.0 / (step + 1))) for step in range(5)
    ]
    for tag, name in (("rank/memory", "rank.memory"), ("node/cpu", "node.cpu")):
        kept = curve(sampled, name)
        points = events.Scalars(tag)
        assert [point.value for point in points] == pytest.approx(list(kept.values), rel=1e-6)
        # The same clock in both: the curve's zero is the start of the run.
        zero = [point.wall_time - at for point, at in zip(points, kept.seconds, strict=True)]
        assert max(zero) - min(zero) < 0.1


OPENED = """
import sys, threading, time
from pathlib import Path
from tunetool.training.rank.curves import Curves
opened = []
def watch(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and threading.current_thread().name.startswith("curves"):
        opened.append(arguments[0])
sys.addaudithook(watch)
with Curves(Path(sys.argv[1]), 0.05, rank=0, local_rank=0, device="cpu") as curves:
    while curves.samples < 5:
        time.sleep(0.01)
print(len(opened) / curves.samples)
"""


def test_a_sample_looks_at_little(sampled: Path, tmp_path: Path) -> None:
    """Assert that it reads some files of the kernel per device, and none per process or thread."""
    assert read_about(sampled)["cpu_seconds"] > 0
    done = call(sys.executable, "-c", OPENED, str(tmp_path))
    assert done.returncode == 0, done.stderr
    devices = [path for kind in ("block", "net", "infiniband") for path in Path("/sys/class", kind).glob("*")]
    assert 0 < float(done.stdout) < 20 + 4 * len(devices)


def test_only_one_rank_of_a_node_samples_the_node(tmp_path: Path) -> None:
    with Curves(tmp_path / "rank-3", INTERVAL, rank=3, local_rank=1, device="cpu"):
        pass
    assert sorted(path.stem for path in (tmp_path / "rank-3/series").glob("*.csv")) == ["rank.cpu", "rank.memory"]


def test_a_run_shorter_than_the_interval_has_a_sample(tmp_path: Path) -> None:
    with Curves(tmp_path / "rank-0", 60.0, rank=0, local_rank=0, device="cpu") as curves:
        time.sleep(0.05)
    assert curves.samples == 1
    assert len(curve(tmp_path / "rank-0", "rank.cpu").values) == 1


def test_no_curves_where_none_are_asked(tmp_path: Path) -> None:
    with Curves(tmp_path / "rank-0", None, rank=0, local_rank=0, device="cpu") as curves:
        curves.scalar("loss", 1.0, 0)
    assert list(tmp_path.iterdir()) == []


def test_an_exception_ends_the_thread_and_keeps_the_curves(tmp_path: Path) -> None:
    curves = Curves(tmp_path / "rank-0", INTERVAL, rank=0, local_rank=0, device="cpu")

    def run() -> None:
        with curves:
            curves.scalar("loss", 1.0, 0)
            raise RuntimeError("the rank's own")

    with pytest.raises(RuntimeError, match="the rank's own"):
        run()
    until(lambda: not [each for each in threading.enumerate() if each.name.startswith("curves")], "the thread's end")
    assert list(curve(tmp_path / "rank-0", "loss").values) == [1.0]
    # Later figures reach no file descriptor that may belong to another file by then.
    curves.scalar("loss", 2.0, 1)
    assert list(curve(tmp_path / "rank-0", "loss").values) == [1.0]


def test_a_name_that_would_leave_the_folder(tmp_path: Path) -> None:
    with (
        Curves(tmp_path / "rank-0", INTERVAL, rank=0, local_rank=0, device="cpu") as curves,
        pytest.raises(ValueError, match="is not a name of a curve"),
    ):
        curves.scalar("../loss", 1.0, 0)


def test_a_place_that_cannot_be_written_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with Curves(tmp_path / "file/rank-0", INTERVAL, rank=0, local_rank=0, device="cpu") as curves:
        curves.scalar("loss", 1.0, 0)
    assert "rank 0: curve `all` ends, the run continues: " in capsys.readouterr().err


FULL = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from tunetool.training.rank.curves import Curves
    with Curves(Path(sys.argv[1]) / "rank-0", 0.05, 0, 0, "cpu") as curves:
        for step in range(20):
            curves.scalar("loss", step, step)
        before = curves.samples
        while curves.samples < before + 2:
            time.sleep(0.01)
        with open(sys.argv[1] + "/other", "wb", buffering=0) as other:
            try:
                while True:
                    other.write(b"x" * 4096)
            except OSError:
                pass
        for step in range(20, 2000):
            curves.scalar("loss", step, step)
        time.sleep(0.5)
    print("the run went on", step)
""")
USER = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]


@pytest.mark.skipif(
    subprocess.run(["unshare", *USER, "--mount", "true"], capture_output=True, check=False).returncode != 0,
    reason="this user may not make a mount namespace",
)
def test_a_disk_that_fills_up_ends_the_curves_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    script = """
        mount -t tmpfs -o size=512k none "$1/small"
        "$2" -c "$3" "$1/small"
        rm "$1/small/other"; cp -r "$1/small/rank-0" "$1/"
    """
    command = ["unshare", *USER, "--mount", "sh", "-ec", script, "sh", str(tmp_path), sys.executable, FULL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (0, "the run went on 1999\n"), done.stderr
    assert "rank 0: curve `loss` ends, the run continues: No space left on device\n" in done.stderr
    # The points before are complete in both forms, and the reason is kept beside them.
    assert (tmp_path / "rank-0/series/loss.csv").read_bytes().endswith(b"\n")
    loss = curve(tmp_path / "rank-0", "loss")
    assert loss.values == loss.steps == list(range(len(loss.values)))
    assert 20 <= len(loss.values) < 2000
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "rank-0/tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    points = events.Scalars("train/loss")
    assert [point.step for point in points] == list(range(len(points)))
    assert {"curves.loss", "curves.tensorboard"} <= {
        check.id for check in gather(tmp_path).checks if check.found == "rank 0: No space left on device"
    }


def test_without_tensorboard_and_nvml_the_files_are_there(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from tunetool.training.rank.curves import Curves
        sys.modules["tensorboard"] = sys.modules["pynvml"] = None
        with Curves(Path(sys.argv[1]) / "rank-0", 0.05, 0, 0, "cuda") as curves:
            curves.scalar("loss", 1.5, 0)
            while curves.samples < 3:
                time.sleep(0.01)
        heavy = {"torch", "tensorflow", "numpy"} & set(sys.modules)
        print(sorted(heavy), curves.left_out)
    """)
    done = call(sys.executable, "-c", program, str(tmp_path))
    reasons = {
        "tensorboard": "TensorBoard is not installed (`pip install tensorboard`)",
        "gpu": "NVML's Python binding is not installed (`pip install nvidia-ml-py`)",
    }
    assert (done.returncode, done.stdout) == (0, f"[] {reasons}\n"), done.stderr
    assert list(curve(tmp_path / "rank-0", "loss").values) == [1.5]
    assert len(curve(tmp_path / "rank-0", "node.cpu").values) >= 2
    assert {check.id: check.found for check in gather(tmp_path).checks} == {
        f"curves.{name}": f"rank 0: {reason}" for name, reason in reasons.items()
    }


# NVML's own interface (nvml.h), as far as it is called, for machines that have no GPU: the binding is the real one.
DRIVER = """
#include <string.h>
typedef struct { unsigned gpu, memory; } util;
typedef struct { unsigned long long total, free, used; } mem;
int nvmlInitWithFlags(unsigned f) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "unknown"; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { if (i > 7) return 6; *h = (void *)(long)(i + 1); return 0; }
int nvmlDeviceGetHandleByUUID(const char *u, void **h) { *h = (void *)100; return strcmp(u, "MIG-5") ? 6 : 0; }
int nvmlDeviceGetUtilizationRates(void *h, util *u) { if ((long)h == 100) return 3; u->gpu = 10 * (long)h; return 0; }
int nvmlDeviceGetMemoryInfo(void *h, mem *m) { m->used = 5000000000ULL + (long)h; return 0; }
int nvmlDeviceGetClockInfo(void *h, int kind, unsigned *mhz) { *mhz = kind == 1 ? 1980 : kind == 2 ? 3201 : 0; return 0; }
"""


def test_a_rank_watches_its_own_gpu(tmp_path: Path) -> None:
    need_program("cc")
    (tmp_path / "nvml.c").write_text(DRIVER)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", str(library), str(tmp_path / "nvml.c")], check=True)
    program = textwrap.dedent("""
        import json, sys
        from tunetool.training.rank.gpu_reading import NoGpu, open_gpu
        for device, rank, visible in json.loads(sys.argv[1]):
            environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
            try:
                gpu = open_gpu(device, rank, environment)
            except NoGpu as why:
                print(json.dumps(str(why)))
            else:
                print(json.dumps(gpu.read()))
                gpu.close()
    """)
    asked = [("cuda", 1, None), ("cuda", 1, "6,2"), ("cuda:0", 1, "6,2"), ("cuda", 0, "MIG-5"), ("cuda", 9, None)]
    done = call(sys.executable, "-c", program, json.dumps(asked), env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    clocks = {"gpu.sm_clock": 1980.0, "gpu.memory_clock": 3201.0}
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"gpu.utilisation": 20.0, "gpu.memory": 5_000_000_002.0, **clocks},
        {"gpu.utilisation": 30.0, "gpu.memory": 5_000_000_003.0, **clocks},
        {"gpu.utilisation": 70.0, "gpu.memory": 5_000_000_007.0, **clocks},
        # A slice of a GPU has no utilisation of its own: that curve alone is not there.
        {"gpu.memory": 5_000_000_100.0, **clocks},
        "NVML knows no GPU `9`: Not Found",
    ]
    assert set(clocks) < set(gpu_reading.UNITS)
