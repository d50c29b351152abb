"""`tunetool bench api` with the real op on a real disk: what it does as documented, and which wrong uses do harm."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from calls import TUNETOOL, call
from judged import proven, undisturbed
from pythons import python_that
from tunetool.bench.api.catalogue import ROWS
from tunetool.measure.aio import Probe
from tunetool.measure.aio.byte_view import byte_view
from tunetool.record import Record, Verdict, parse

pytest_plugins = ["disks"]
pytestmark = pytest.mark.usefixtures("ready")

SIZE = 8 * 2**20
DOES_HARM = ("unaligned-offset", "unaligned-size", "unaligned-address", "strided-read", "free-view", "no-space")


def command(target: Path, runs: Path, *arguments: object) -> list[str]:
    common = ["--target", str(target), "--runs-dir", str(runs), "--allow-busy", "--size", "8MiB"]
    return [*TUNETOOL, "bench", "api", *common, *map(str, arguments)]


def bench(target: Path, runs: Path, *arguments: object, **more: Any) -> tuple[subprocess.CompletedProcess[str], Record]:
    done = call(*command(target, runs, *arguments, "--json", "-"), **more)
    return done, parse(done.stdout, "stdout")


def test_every_call_is_made_and_compared(disk: Path, tmp_path: Path, ready: Probe) -> None:
    (disk / "theirs").write_text("keep")
    done, record = bench(disk, tmp_path / "runs", "--samples", 1, "--parallelism", 2)
    alone = undisturbed_but_noted(done.returncode, record)
    assert [check.id for check in record.checks if "misuse" not in check.id] == [
        "api.version",
        *(row.id for row in ROWS if row.group != "misuse"),
    ]
    by_name = {check.id.removeprefix("api."): check for check in record.checks}
    left_out = {name for name, check in by_name.items() if check.status == "skip"}
    # Of this machine: no GPU, and the op `utils` where nobody built it.
    assert left_out <= {"call.gpu", "call.gds", "cast.gpu", "cast.deepspeed", "misuse.cast-strided"}
    if not ready.cuda:
        assert "sees no GPU" in by_name["call.gpu"].found
    failed = {name for name, check in by_name.items() if check.status == "fail"}
    harm = {f"misuse.{name}" for name in DOES_HARM}
    assert failed - {"misuse.cast-strided"} == harm, "DeepSpeed refuses another set of wrong uses: mend the guide"
    assert all(by_name[name].remedy for name in failed)
    assert "SIGABRT" in by_name["misuse.short-file"].found
    assert by_name["call.new-locked"].found.startswith("torch.Size([1024]), torch.float32")
    figures = {each.name: each for each in record.measurements}
    assert sorted(figures) == [f"api.{way}.{how}" for way in ("async", "parallel", "sync") for how in ("read", "write")]
    for name, figure in figures.items():
        proven(figure, alone)
        assert figure.evidence is not None
        assert figure.evidence.claimed_bytes == SIZE
        assert figure.parameters["pending"] == (4 if "async" in name else 1)
        assert figure.parameters["intra_op_parallelism"] == (2 if "parallel" in name else 1)
    assert [entry.name for entry in disk.iterdir()] == ["theirs"]
    (kept,) = (tmp_path / "runs").iterdir()
    assert "api.misuse.free-view" in (kept / "report.html").read_text()
    shown = " ".join(call(*TUNETOOL, "report", "show", kept).stdout.split())
    assert "free-view HARM it returns True and frees the whole tensor" in shown
    assert f"{len(failed)} of " in shown


def undisturbed_but_noted(code: int, record: Record) -> bool:
    """As ``undisturbed``: the wrong uses are a note, and change no verdict."""
    assert record.verdict is not None
    notes = [reason for reason in record.verdict.reasons if "wrong uses are not refused" in reason]
    assert len(notes) == 1
    reasons = [reason for reason in record.verdict.reasons if reason not in notes]
    plain: Record = record.model_copy(update={"verdict": Verdict(status=record.verdict.status, reasons=reasons)})
    alone: bool = undisturbed(code, plain)
    return alone


def test_storage_that_keeps_other_bytes_fails(disk: Path, tmp_path: Path) -> None:
    # What a row reads back is damaged just before, as by a bad drive.
    liar = tmp_path / "liar"
    liar.mkdir()
    (liar / "sitecustomize.py").write_text(
        "import os\n"
        "real = os.path.join\n"
        "def spoil(event, arguments):\n"
        "    if event == 'open' and arguments[1] == 'r' and str(arguments[0]).endswith('/sync'):\n"
        "        descriptor = os.open(arguments[0], os.O_WRONLY)\n"
        "        os.pwrite(descriptor, b'tunetool', 1000)\n"
        "        os.close(descriptor)\n"
        "import sys\n"
        "sys.addaudithook(spoil)\n"
    )
    python = python_that(tmp_path, f"export PYTHONPATH={liar}:$PYTHONPATH")
    done, record = bench(disk, tmp_path / "runs", "--samples", 1, "--python", python)
    assert done.returncode == 1, done.stderr
    by_name = {check.id: check for check in record.checks}
    assert by_name["api.call.sync"].status == "fail"
    assert by_name["api.call.sync"].found == "the file holds other bytes"
    assert by_name["api.call.async"].status == "pass"
    assert list(disk.iterdir()) == []


def test_ops_with_another_cpp_runtime_fail_with_their_cure(disk: Path, tmp_path: Path, ready: Probe) -> None:
    # What the compiler of the ops made, linked as by one that has no libstdc++.so.
    for part in ready.parts("async_io"):
        folder = Path(shutil.copytree(ready.folder(part), tmp_path / "ops" / part))
        recipe = (folder / "build.ninja").read_text()
        flags = next(line.partition("=")[2] for line in recipe.splitlines() if line.startswith("ldflags"))
        # The recipe may name the torch of another checkout.
        flags = f"{flags} -L{ready.torch_path}/lib -static-libstdc++ -static-libgcc -o {part}.so"
        objects = [path.name for path in folder.glob("*.o")]
        subprocess.run(["c++", *objects, *shlex.split(flags)], cwd=folder, check=True)
    changed = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")}
    done, record = bench(disk, tmp_path / "runs", "--samples", 1, env=changed)
    assert done.returncode == 1, done.stderr
    check = next(check for check in record.checks if check.id == "api.call.runtime")
    assert check.status == "fail"
    assert check.found.startswith("pin_memory.so, async_io.so: a runtime beside torch's")
    assert "`CXX=c++ tunetool build-ops --rebuild`" in check.remedy


def test_the_bytes_of_a_tensor_are_its_own() -> None:
    torch = pytest.importorskip("torch")
    numbers = torch.ones(3, 5, dtype=torch.bfloat16)
    view = byte_view(numbers)
    assert (view.shape, view.dtype, view.data_ptr()) == ((30,), torch.uint8, numbers.data_ptr())
    view[0] = 0
    assert numbers[0, 0] != 1
    assert byte_view(torch.tensor(1.0)).tolist() == [0, 0, 128, 63]
    assert byte_view(torch.ones(2, requires_grad=True)).numel() == 8
    assert byte_view(torch.empty(0)).numel() == 0
    for strange in (numbers.t(), numbers[:, :4], torch.ones(4, dtype=torch.complex64).conj(), numbers.to_sparse()):
        with pytest.raises(ValueError, match=r"contiguous|other values|no bytes of its own"):
            byte_view(strange)
