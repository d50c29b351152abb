"""Curves on a recorded machine: the kernel's counters, the choice of the GPU, and the files of a run."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from builders import record
from tunetool import record as records
from tunetool.record import CheckResult, Series
from tunetool.training.rank import curves as curves_module
from tunetool.training.rank import gpu_reading, kernel_counters
from tunetool.training.rank.curve_files import CurveFile, finite, gather, opening_line, read_curve
from waiting import PATIENCE

MIB = 2**20


def put(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def disk(root: Path, name: str, read_sectors: int, written_sectors: int) -> Path:
    folder = root / "sys/block" / name
    put(folder, stat=f"10 0 {read_sectors} 5 20 0 {written_sectors} 7 0 9 12 0 0 0 0")
    (folder / "slaves").mkdir(exist_ok=True)
    return folder


def machine(root: Path, cpu: str, read_sectors: int, network: int, lanes: int) -> None:
    put(
        root,
        **{
            "proc/stat": f"cpu  {cpu}\ncpu0 {cpu}\nintr 5\n",
            "proc/net/dev": "Inter-| Receive | Transmit\n face |bytes packets\n"
            f"    lo: 900 1 0 0 0 0 0 0 900 1 0 0 0 0 0 0\n"
            f"  eth0: {network} 1 0 0 0 0 0 0 {2 * network} 1 0 0 0 0 0 0\n"
            f" bond0: {network} 1 0 0 0 0 0 0 {2 * network} 1 0 0 0 0 0 0\n",
            "sys/class/net/eth0/device/vendor": "0x15b3",
            "sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data": str(lanes),
            "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data": str(3 * lanes),
            "sys/class/infiniband/mlx5_1/ports/1/counters/port_rcv_data": str(lanes),
        },
    )
    for number in (0, 1):
        disk(root, f"nvme{number}n1", read_sectors, 0)
    array = disk(root, "md0", 2 * read_sectors, 0)
    (array / "slaves/nvme0n1").mkdir(exist_ok=True)
    disk(root, "loop0", read_sectors, 0)


def test_rates_of_a_node(tmp_path: Path) -> None:
    machine(tmp_path, cpu="100 0 50 800 50 0 0 0 0 0", read_sectors=1000, network=5000, lanes=100)
    before = kernel_counters.node_counters(str(tmp_path))
    # 100 ticks more: 40 busy (10 of them stolen by the host), 50 idle, 10 waiting for a disk, which is idle.
    machine(tmp_path, cpu="120 0 60 850 60 0 0 10 0 0", read_sectors=3000, network=7000, lanes=350)
    rates = kernel_counters.rates(before, kernel_counters.node_counters(str(tmp_path)), 2.0)
    assert rates == {
        "node.cpu": 40.0,
        # Two drives: neither the array over them nor the loop device counts them again.
        "node.disk_read": 2 * 2000 * 512 / 2,
        "node.disk_write": 0.0,
        # Neither the loopback nor the bond over eth0.
        "node.network_in": 1000.0,
        "node.network_out": 2000.0,
        "node.rdma_in": 2 * 250 * 4 / 2,
        "node.rdma_out": 750 * 4 / 2,
    }
    assert set(rates) <= set(kernel_counters.UNITS)


def test_a_counter_that_ran_backwards_is_no_rate(tmp_path: Path) -> None:
    machine(tmp_path, cpu="100 0 50 800 50 0 0 0 0 0", read_sectors=1000, network=5000, lanes=100)
    before = kernel_counters.node_counters(str(tmp_path))
    machine(tmp_path, cpu="120 0 60 850 60 0 0 0 0 0", read_sectors=10, network=6000, lanes=100)
    rates = kernel_counters.rates(before, kernel_counters.node_counters(str(tmp_path)), 1.0)
    assert "node.disk_read" not in rates
    assert rates["node.network_in"] == 1000.0


def test_a_container_without_a_real_port_has_its_virtual_one(tmp_path: Path) -> None:
    put(tmp_path, **{"proc/net/dev": "a\nb\n lo: 9 0 0 0 0 0 0 0 9 0\n veth1: 70 0 0 0 0 0 0 0 30 0 0\n"})
    assert kernel_counters.node_counters(str(tmp_path)) == {"node.network_in": 70, "node.network_out": 30}


def test_paths_of_a_multipath_namespace_are_counted_once(tmp_path: Path) -> None:
    for name in ("nvme0n1", "nvme0c0n1", "nvme0c1n1", "nvme3n1", "sda", "sr0"):
        disk(tmp_path, name, 1, 1)
    assert kernel_counters.drives(str(tmp_path)) == ["nvme0c0n1", "nvme0c1n1", "nvme3n1", "sda"]


def test_memory_of_the_node_and_of_the_control_group(tmp_path: Path) -> None:
    put(
        tmp_path,
        **{
            "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\nShmem: 200 kB\nHugePages_Total: 0\n",
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/memory.current": "900",
            "sys/fs/cgroup/job/step/memory.current": "700",
            "sys/fs/cgroup/job/step/memory.stat": "anon 300\ninactive_file 150\nactive_file 50\n",
        },
    )
    assert kernel_counters.node_gauges(str(tmp_path)) == {
        "node.memory": 600 * 1024,
        "node.shared_memory": 200 * 1024,
        "node.memory_group": 500,
    }


def test_a_process_whose_name_looks_like_its_fields(tmp_path: Path) -> None:
    put(tmp_path, **{"proc/self/stat": "7 (a) R (b) S 1 7 7 0 -1 4194304 5 0 0 0 250 150 0 0 20 0 3 0 9 9 9"})
    assert kernel_counters.process_counters(str(tmp_path)) == {"rank.cpu": 400.0}


def test_what_cannot_be_read_is_no_curve(tmp_path: Path) -> None:
    for read in (
        kernel_counters.node_counters,
        kernel_counters.node_gauges,
        kernel_counters.process_counters,
        kernel_counters.process_gauges,
    ):
        assert read(str(tmp_path)) == {}


@pytest.mark.parametrize(
    ("visible", "index", "chosen"),
    [(None, 3, 3), ("4,5", 1, 5), (" 6 ", 0, 6), ("GPU-1f,GPU-2e", 1, "GPU-2e"), ("MIG-7a", 0, "MIG-7a")],
)
def test_the_gpu_that_a_rank_computes_on(visible: str | None, index: int, chosen: int | str) -> None:
    assert gpu_reading.choose(visible, index) == chosen


def test_a_gpu_that_is_not_shown() -> None:
    with pytest.raises(gpu_reading.NoGpu, match="CUDA_VISIBLE_DEVICES is `4`, which shows no GPU 1"):
        gpu_reading.choose("4", 1)


def test_a_curve_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "loss.csv"
    file = CurveFile(path, "1", stepped=True)
    for step, value in enumerate((2.5, float("nan"), 1.25)):
        file.add(step / 2, value, step)
    file.close()
    curve = read_curve(path)
    assert curve is not None
    assert (curve.name, curve.unit, curve.steps) == ("loss", "1", [0, 1, 2])
    assert finite(curve) == [(0.0, 2.5), (1.0, 1.25)]


def test_a_line_cut_off_by_a_rank_s_death_is_left_out(tmp_path: Path) -> None:
    put(tmp_path, **{"node.cpu.csv": "seconds,value (%)\n0.5,10\n1.0,20\n1.5,3"})
    curve = read_curve(tmp_path / "node.cpu.csv")
    assert curve is not None
    assert list(curve.values) == [10.0, 20.0]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "seconds,value (%)\n1\n", "seconds,value (1),step\n1,2\n"])
def test_what_is_no_curve(tmp_path: Path, text: str) -> None:
    put(tmp_path, **{"x.csv": text})
    assert read_curve(tmp_path / "x.csv") is None


def test_what_is_kept_of_a_run(tmp_path: Path) -> None:
    for rank in (0, 10, 2):
        put(
            tmp_path / f"out/rank-{rank}",
            **{
                "series/loss.csv": f"seconds,value (1),step\n0.1,{rank},0\n",
                "series/node.cpu.csv": "seconds,value (%)\n",
                "series/about.json": json.dumps(
                    {"left_out": {"gpu": "none"}, "ended": {"loss": "full"} if rank else {}}
                ),
            },
        )
        (tmp_path / f"out/rank-{rank}/tensorboard").mkdir()
        (tmp_path / f"out/rank-{rank}/tensorboard/events.out.tfevents.1.a.1.0").write_bytes(b"\xff\x00" + bytes([rank]))
    gathered = gather(tmp_path / "out", "1x8-z2/")
    assert gathered.series == [
        Series(name="1x8-z2/loss", unit="1", rank=rank, file=f"series/1x8-z2/rank-{rank}/loss.csv")
        for rank in (0, 2, 10)
    ]
    assert gathered.checks == [
        CheckResult(id="curves.1x8-z2/gpu", status="skip", expected="a curve", found="ranks 0, 2, 10: none"),
        CheckResult(id="curves.1x8-z2/loss", status="skip", expected="a curve", found="ranks 2, 10: full"),
    ]
    kept = record(kind="bench.finetune", series=gathered.series)
    run = records.write(kept, tmp_path / "runs", gathered.raw).parent
    assert records.read(run).series == gathered.series
    for each in gathered.series:
        curve = read_curve(run / each.file)
        assert curve is not None
        assert curve.values == [float(each.rank or 0)]
    events = run / "tensorboard/1x8-z2/rank-10/events.out.tfevents.1.a.1.0"
    assert events.read_bytes() == b"\xff\x00\x0a"
    assert opening_line(run) == f"tensorboard --logdir {run}/tensorboard"


def test_a_thread_that_samples_still_is_not_taken_for_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Before Python 3.13 that is so once Ctrl-C has interrupted a `join`.
    monkeypatch.setattr(threading.Thread, "is_alive", lambda thread: False)
    monkeypatch.setattr(threading.Thread, "join", lambda thread, timeout=None: None)
    monkeypatch.setattr(curves_module, "_PATIENCE", 0.01)
    sampling, let_go = threading.Event(), threading.Event()

    class Stuck(curves_module.Curves):
        def _sample(self) -> None:
            sampling.set()
            assert let_go.wait(PATIENCE)
            super()._sample()

    curves = Stuck(tmp_path / "rank-0", 0.001, rank=0, local_rank=0, device="cpu")
    try:
        with curves:
            curves.scalar("loss", 1.0, 0)
            assert sampling.wait(PATIENCE)
        assert "did not end within" in curves.ended["all"]
        # Its files are still open: what it writes must reach no other file.
        curves.scalar("loss", 2.0, 1)
        assert list(read_curve(tmp_path / "rank-0/series/loss.csv").values) == [1.0, 2.0]
    finally:
        let_go.set()


def test_a_run_without_curves(tmp_path: Path) -> None:
    assert gather(tmp_path) == gather(tmp_path / "absent")
    assert gather(tmp_path).raw == {}
    assert opening_line(tmp_path) is None
