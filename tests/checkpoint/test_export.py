"""``tunetool checkpoint export`` and ``import``: every tensor comes out as it was saved, in whichever parts that was."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_programs import run_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tunetool.checkpoint import DirectReader, DirectSavePlanner, DirectWriter, export_writer, metadata, space
from tunetool.checkpoint.exporting import Request
from tunetool.checkpoint.exporting import run as export_step
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.loading import importing
from tunetool.report.progress import PlainProgress
from waiting import PATIENCE

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Run = Callable[..., tuple[int, str]]


def save(path: Path, state: Any, *, by_torch: bool = False, planner: Any = None) -> Path:
    writer = dcp.FileSystemWriter(path, sync_files=False) if by_torch else DirectWriter(path)
    dcp.save(state, storage_writer=writer, planner=planner or DirectSavePlanner(), no_dist=True)
    return path


def tensors_in(out: Path) -> dict[str, torch.Tensor]:
    """As the safetensors library reads them."""
    found: dict[str, torch.Tensor] = {}
    for path in out.glob("*.safetensors"):
        found |= load_file(path)
    return found


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors differ in dtype, shape or bytes."""

    def raw(tensor: torch.Tensor) -> tuple[Any, ...]:
        content = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)
        return tensor.dtype, tensor.shape, content.tolist()

    names = {*found, *expected}
    return [name for name in names if name not in found or raw(found[name]) != raw(expected[name])]


MODEL = {
    "layers.0.weight": torch.randn(120, 77, generator=torch.Generator().manual_seed(1)),
    "layers.1.weight": torch.randn(50, 33, generator=torch.Generator().manual_seed(2)).bfloat16(),
    "turned": torch.arange(60.0).view(5, 12).t(),
    "one": torch.tensor(2.5),
    "none": torch.empty(0, 4),
    "mask": torch.tensor([True, False, True]),
}
STATE = {
    "model": MODEL,
    "optim": {"state": {"layers.0.weight": {"exp_avg": torch.ones(3)}}},
    "step": torch.tensor(7),
    "epoch": 3,
}


@pytest.fixture(scope="module", params=[False, True], ids=["direct", "torch"])
def step(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("step") / "step_7", STATE, by_torch=request.param)


# Any tensor, in any parts.

DTYPES = [
    getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "float64", "int64", "int8", "uint16", "bool", "complex64")
] + [torch.float8_e4m3fn, torch.float8_e5m2]


class Parts(dcp.DefaultSavePlanner):
    """Saves each tensor in the chunks that a grid of cuts makes, as ranks with any sharding would."""

    def __init__(self, cuts: dict[str, list[list[int]]]) -> None:
        super().__init__()
        self.cuts = cuts

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, tensor in self.state_dict.items():
            edges = [[0, *cuts, size] for cuts, size in zip(self.cuts[name], tensor.shape, strict=True)]
            for box in itertools.product(*(itertools.pairwise(each) for each in edges)):
                offsets, sizes = (torch.Size(each) for each in ([a for a, _ in box], [b - a for a, b in box]))
                data = TensorWriteData(
                    ChunkStorageMetadata(offsets, sizes), TensorProperties(tensor.dtype), tensor.shape
                )
                items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def resolve_data(self, item: WriteItem) -> Any:
        tensor = self.state_dict[item.index.fqn]
        for dimension, (at, size) in enumerate(
            zip(item.index.offset, item.tensor_data.chunk.sizes, strict=True)  # type: ignore[union-attr, arg-type]
        ):
            tensor = tensor.narrow(dimension, at, size)
        return tensor.contiguous()


@st.composite
def states(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[str, list[list[int]]]]:
    """Tensors with random bytes, and where each dimension is cut."""
    state, cuts = {}, {}
    for number in range(draw(st.integers(1, 4))):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(1, 40), max_size=3))
        shape[:1] = [shape[0] * draw(st.sampled_from([1, 9]))] if shape else []
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        count = torch.Size(shape).numel()
        high = 2 if dtype == torch.bool else 256
        raw = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        state[f"t{number}"] = raw.view(dtype).view(shape)
        cuts[f"t{number}"] = [
            sorted(draw(st.sets(st.integers(1, size - 1), max_size=2))) if size > 1 else [] for size in shape
        ]
    return state, cuts


@settings(deadline=None, max_examples=40)
@given(states(), st.booleans(), st.sampled_from([4096, 8192, 32 << 20]), st.sampled_from([1, 30_000, 10**9]))
def test_any_tensor_in_any_parts_comes_out_as_saved(
    made: tuple[dict[str, torch.Tensor], dict[str, list[list[int]]]], by_torch: bool, window: int, shard: int
) -> None:
    state, cuts = made
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_writer, "WINDOW", window)
        step, out = Path(directory, "step"), Path(directory, "out")
        save(step, state, by_torch=by_torch, planner=Parts(cuts))
        export_step(Request(step, out, shard_bytes=shard), PlainProgress())
        assert differing(tensors_in(out), state) == []
        again = Path(directory, "again")
        importing.run(importing.ImportRequest(out, again), PlainProgress())
        loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        dcp.load(loaded, storage_reader=DirectReader(again), no_dist=True)
        assert differing(loaded, state) == []


# Models of transformers.


@pytest.mark.parametrize("world", [1, 2])
def test_transformers_computes_the_same_with_what_came_out(tmp_path: Path, world: int, run: Run) -> None:
    import transformers as hf
    from export_ranks import FAMILIES, logits_of

    for rank in run_ranks(Path(__file__).with_name("export_ranks.py"), str(tmp_path), world=world):
        assert rank.code == 0, rank.stderr[-3000:]
    for family, writer in itertools.product(FAMILIES, ("direct", "torch")):
        home, out = tmp_path / family, tmp_path / family / f"out-{writer}"
        words = "--prefix", "model.", "--config", home / "config.json", "--shard-size", "40kB", "--processes", 1
        assert run("export", home / writer, out, *words)[0] == 0
        model, loading = hf.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert torch.equal(logits_of(model), torch.load(home / "logits.pt"))
    # Of two tied tensors one is enough.
    (tmp_path / "names.json").write_text('{"lm_head.weight": null}')
    home, words = tmp_path / "qwen2", ("--prefix", "model.", "--names", tmp_path / "names.json")
    run("export", home / "direct", home / "one", *words, "--config", home / "config.json")
    model = hf.AutoModelForCausalLM.from_pretrained(home / "one")
    assert torch.equal(logits_of(model), torch.load(home / "logits.pt"))


# What is taken, under which names.


def test_a_prefix_selects_and_is_taken_off(step: Path, tmp_path: Path, run: Run) -> None:
    code, printed = run("export", step, tmp_path / "out", "--prefix", "model.")
    assert (code, differing(tensors_in(tmp_path / "out"), MODEL)) == (0, [])
    assert "Left out: 2 not of `model.`, 1 not a tensor\n" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_an_optimizer_comes_only_if_it_is_selected(step: Path, tmp_path: Path, run: Run) -> None:
    assert "1 of the optimizer" in run("export", step, tmp_path / "all")[1]
    assert tensors_in(tmp_path / "all").keys() == {*(f"model.{name}" for name in MODEL), "step"}
    run("export", step, tmp_path / "optim", "--prefix", "optim.")
    assert tensors_in(tmp_path / "optim").keys() == {"state.layers.0.weight.exp_avg"}


def test_names_are_given_by_a_table(step: Path, tmp_path: Path, run: Run) -> None:
    table = {"layers.*.weight": "h.*.w", "layers.1.weight": "second", "mask": None, "none": None}
    (tmp_path / "names.json").write_text(json.dumps(table))
    words = "--prefix", "model.", "--names", tmp_path / "names.json"
    printed = run("export", step, tmp_path / "out", *words)[1]
    assert tensors_in(tmp_path / "out").keys() == {"h.0.w", "second", "turned", "one"}
    assert "2 by `--names`" in printed


@pytest.mark.parametrize(
    ("table", "message", "hint"),
    [
        ({"layers.0.wieght": "a"}, "`layers.0.wieght` of `--names` is not there", "did you mean `layers.0.weight`"),
        ({"head.*": "*"}, "`head.*` of `--names` is not there", "lists the names"),
        ({"layers.*.weight": "w"}, "`model.layers.0.weight` and `model.layers.1.weight` would both be called `w`", ""),
        ({"one": "mask"}, "`model.one` and `model.mask` would both be called `mask`", ""),
        ({"one": "__metadata__"}, "`model.one` would be called `__metadata__`", ""),
        ({"*": None}, "no tensor is left to write", ""),
        ({"one": "a.*"}, "has not the same number of `*` on both sides", ""),
        ({"one": 1}, "is not a table of names", "null to leave it out"),
        ([], "is not a table of names", ""),
    ],
)
def test_a_table_of_names_is_checked_as_a_whole(
    step: Path, tmp_path: Path, run: Run, table: Any, message: str, hint: str
) -> None:
    (tmp_path / "names.json").write_text(json.dumps(table))
    with pytest.raises(UsageProblem) as caught:
        run("export", step, tmp_path / "out", "--prefix", "model.", "--names", tmp_path / "names.json")
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_a_prefix_that_nothing_has_is_refused(step: Path, tmp_path: Path, run: Run) -> None:
    with pytest.raises(UsageProblem, match=r"no tensor begins with `modle\.`") as caught:
        run("export", step, tmp_path / "out", "--prefix", "modle.")
    assert caught.value.hint == "did you mean `model.`?"


def test_a_dtype_is_converted_only_when_asked(step: Path, tmp_path: Path, run: Run) -> None:
    code, printed = run("export", step, tmp_path / "out", "--prefix", "model.", "--dtype", "bfloat16")
    expected = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in MODEL.items()}
    assert (code, differing(tensors_in(tmp_path / "out"), expected)) == (0, [])
    assert "float32 -> bfloat16: 4 tensors\n" in printed


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("window", [4096, 300 * 4096])
def test_parts_of_a_tensor_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_torch: bool, window: int
) -> None:
    state = {"one": torch.ones(3), "w": torch.randn(701, 301).double(), "v": torch.arange(7)}
    cuts = {"one": [[]], "w": [[100, 299], []], "v": [[3]]}
    step = save(tmp_path / "step", state, by_torch=by_torch, planner=Parts(cuts))
    monkeypatch.setattr(export_writer, "WINDOW", window)
    export_step(Request(step, tmp_path / "out", dtype="bfloat16"), PlainProgress())
    expected = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    assert differing(tensors_in(tmp_path / "out"), expected) == []


@pytest.mark.parametrize(
    ("to", "saved"),
    [
        ("float16", torch.tensor([1.0, 1e6, torch.inf, -1e6])),
        ("bfloat16", torch.tensor([1.0, 3.4e38, torch.inf, -3.4e38])),
        ("float32", torch.tensor([1.0, 1e39, torch.inf, -1e300], dtype=torch.float64)),
    ],
)
def test_numbers_that_a_dtype_cannot_hold_are_counted(tmp_path: Path, run: Run, to: str, saved: torch.Tensor) -> None:
    step = save(tmp_path / "step", {"w": saved})
    assert f"2 numbers too large for {to}" in run("export", step, tmp_path / "out", "--dtype", to)[1]
    save_file({"w": saved}, tmp_path / "w.safetensors")
    assert (
        f"2 numbers too large for {to}"
        in run("import", tmp_path / "w.safetensors", tmp_path / "step_1", "--dtype", to)[1]
    )


def test_a_dtype_that_safetensors_lacks_is_refused(tmp_path: Path, run: Run) -> None:
    step = save(tmp_path / "step", {"w": torch.zeros(3, dtype=torch.complex128)})
    with pytest.raises(UsageProblem, match="`w` has dtype complex128"):
        run("export", step, tmp_path / "out")


def test_the_models_small_files_are_copied(step: Path, tmp_path: Path, run: Run) -> None:
    home = tmp_path / "model"
    home.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json", "modeling.py", "a.safetensors"):
        (home / name).write_text("{}")
    run("export", step, tmp_path / "out", "--prefix", "model.", "--config", home)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors"}
    for wrong in (home / "a.safetensors.d", step, home / "modeling.txt"):
        (home / "modeling.txt").write_text("[")
        with pytest.raises(UsageProblem):
            run("export", step, tmp_path / "other", "--config", wrong)


# Whole, or not there.


@pytest.mark.parametrize(("cuts", "damaged"), [([[], [30]], [0, 30]), ([[3000], []], [3000, 0])])
def test_a_damaged_tensor_is_named_and_nothing_appears(
    tmp_path: Path, run: Run, cuts: list[list[int]], damaged: list[int]
) -> None:
    # In parts of columns, of which a window has some rows of each part; and of rows, whose blocks it does not end with.
    state = {"w": torch.randn(6000, 100), "v": torch.randn(10)}
    step = save(tmp_path / "step", state, planner=Parts({"w": cuts, "v": [[]]}))
    place = next(at for index, at in metadata.read(step).storage_data.items() if index.offset == torch.Size(damaged))
    with (step / place.relative_path).open("r+b") as stream:
        stream.seek(place.offset + place.length // 2)
        stream.write(b"\xff\xff\xff\xff")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_writer, "WINDOW", 300 * 4096)
        with pytest.raises(CannotJudge, match="`w` is damaged"):
            run("export", step, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_a_data_file_outside_of_the_step_is_refused(tmp_path: Path, run: Run) -> None:
    step = save(tmp_path / "step", {"w": torch.ones(10)})
    data = next(step.glob("*.distcp"))
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotJudge, match="leads out of"):
        run("export", step, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_step_that_is_written_to_meanwhile_is_noticed(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = save(tmp_path / "step", {"w": torch.ones(10)}, by_torch=True)
    write = export_writer.FileWriter.write

    def touched(self: Any, *arguments: Any) -> None:
        write(self, *arguments)
        os.utime(next(step.glob("*.distcp")))

    monkeypatch.setattr(export_writer.FileWriter, "write", touched)
    with pytest.raises(CannotJudge, match="was written to while it was exported"):
        run("export", step, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_what_exists_is_not_replaced(step: Path, tmp_path: Path, run: Run) -> None:
    for kind in ("file", "directory", "link"):
        path = tmp_path / kind
        if kind == "file":
            path.touch()
        elif kind == "directory":
            path.mkdir()
        else:
            path.symlink_to("nowhere")
        for words in (("export", step, path), ("import", step, path)):
            with pytest.raises(UsageProblem, match=f"`{path}` exists"):
                run(*words)
    with pytest.raises(UsageProblem, match="is not a directory"):
        run("export", step, tmp_path / "missing" / "out")
    with pytest.raises(UsageProblem, match="is in the step that is exported"):
        run("export", step, step / "out")


def test_a_full_disk_is_known_before_anything_is_written(
    step: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "free", lambda directory: 1000)
    with pytest.raises(CannotJudge, match="the export needs"):
        run("export", step, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_writes_nothing(step: Path, tmp_path: Path, run: Run) -> None:
    code, printed = run("export", step, tmp_path / "out", "--shard-size", "20kB", "--dry-run", "--json", "-")
    told = json.loads(printed)
    assert (code, told["written"], list(tmp_path.iterdir())) == (0, False, [])
    assert [file["name"] for file in told["files"]] == [f"model-{n:05}-of-00002.safetensors" for n in (1, 2)]
    assert told["left_out"] == {"of the optimizer": ["optim.state.layers.0.weight.exp_avg"], "not a tensor": ["epoch"]}


def test_several_processes_write_the_same_files(tmp_path: Path, run: Run) -> None:
    step = save(tmp_path / "step", STATE)
    run("export", step, tmp_path / "one", "--shard-size", "20kB")
    run("export", step, tmp_path / "two", "--shard-size", "20kB", "--processes", 2)
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
    assert len(one) == 3
    index = json.loads(one["model.safetensors.index.json"])
    assert set(index["weight_map"]) == tensors_in(tmp_path / "one").keys()


def test_damage_is_named_by_a_process_of_several(tmp_path: Path, run: Run) -> None:
    step = save(tmp_path / "step", {"v": torch.randn(9000), "w": torch.randn(9000)})
    place = next(at for index, at in metadata.read(step).storage_data.items() if index.fqn == "w")
    with (step / place.relative_path).open("r+b") as stream:
        stream.seek(place.offset + place.length // 2)
        stream.write(b"\xff\xff\xff\xff")
    with pytest.raises(CannotJudge, match="`w` is damaged"):
        run("export", step, tmp_path / "out", "--shard-size", "30kB", "--processes", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


HANGING = """
import sys, time
from tunetool.checkpoint import export_writer
from tunetool.cli.main import main

def hang(self, files, tick):
    (self._target.directory / files[0].name).touch()
    print("writes", flush=True)
    while tick(0):
        time.sleep(0.02)

export_writer.FileWriter.write = hang
if __name__ == "__main__":  # its processes have the rest from here
    sys.argv[1:] = ["checkpoint", "export", *sys.argv[1:]]
    main()
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_export_leaves_no_directory_of_its_name(tmp_path: Path, run: Run, processes: int) -> None:
    step = save(tmp_path / "step", STATE)
    hidden, program = tmp_path / ".out.unfinished", tmp_path / "program.py"
    program.write_text(HANGING, encoding="utf-8")
    words = [sys.executable, str(program), str(step), str(tmp_path / "out"), "--shard-size", "20kB"]
    words += ["--processes", str(processes)]
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        ) as process:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(processes)] == ["writes\n"] * processes
            with pytest.raises(CannotJudge, match="another process writes"):
                run("export", step, tmp_path / "out")
            # Ctrl-C goes to all processes of a terminal; an end from outside to this one alone.
            (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
            assert process.wait(PATIENCE) == code
            # Its processes have it as their output too: they end with it.
            assert not process.stdout.read()
        assert not (tmp_path / "out").exists()
        assert hidden.exists() == (number == signal.SIGKILL)
    run("export", step, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "program.py", "step"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


# The way back.


def test_an_import_and_an_export_give_the_same_bytes(step: Path, tmp_path: Path, run: Run) -> None:
    words = "--prefix", "model."
    run("export", step, tmp_path / "a", *words, "--shard-size", "20kB")
    assert run("import", tmp_path / "a", tmp_path / "step_8", *words)[0] == 0
    run("export", tmp_path / "step_8", tmp_path / "b", *words, "--shard-size", "20kB")
    assert differing(tensors_in(tmp_path / "b"), tensors_in(tmp_path / "a")) == []
    assert run("verify", tmp_path / "step_8")[0] == 0
    assert run("diff", step, tmp_path / "step_8", "model.*")[0] == 0
    loaded = {"model": {name: torch.zeros_like(tensor).contiguous() for name, tensor in MODEL.items()}}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path / "step_8"), no_dist=True)
    assert differing(loaded["model"], MODEL) == []


def test_an_import_converts_and_renames(tmp_path: Path, run: Run) -> None:
    save_file({"a.w": torch.ones(5), "b": torch.arange(3)}, tmp_path / "x.safetensors")
    (tmp_path / "names.json").write_text(json.dumps({"a.*": "c.*"}))
    words = "--dtype", "bfloat16", "--names", tmp_path / "names.json", "--prefix", "model."
    printed = run("import", tmp_path / "x.safetensors", tmp_path / "step", *words)[1]
    assert "float32 -> bfloat16: 1 tensor\nConverted tensors: 10 B of memory\n" in printed
    loaded = {"model.c.w": torch.zeros(5).bfloat16(), "model.b": torch.zeros(3, dtype=torch.int64)}
    dcp.load(loaded, storage_reader=DirectReader(tmp_path / "step"), no_dist=True)
    assert (loaded["model.c.w"].tolist(), loaded["model.b"].tolist()) == ([1.0] * 5, [0, 1, 2])


def test_an_import_that_fails_leaves_nothing(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(5)}, tmp_path / "x.safetensors")
    finish = DirectWriter.finish

    def touched(self: Any, **arguments: Any) -> None:
        finish(self, **arguments)
        os.utime(tmp_path / "x.safetensors")

    monkeypatch.setattr(DirectWriter, "finish", touched)
    with pytest.raises(CannotJudge, match="changed while it was loaded"):
        run("import", tmp_path / "x.safetensors", tmp_path / "step")
    assert not run("import", tmp_path / "x.safetensors", tmp_path / "step", "--dry-run")[0]
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
    with pytest.raises(UsageProblem, match="holds no weights"):
        run("import", tmp_path, tmp_path / "step")
