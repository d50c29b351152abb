"""Ranks that load slices of models, and what transformers and FSDP2 have of the same files.

``shard_ranks.py DIRECTORY CASE:WORLD,WORLD...``: its last line is JSON, by case, number of ranks and for each rank what
differs, the bytes read and those of the parts. The ranks are forks, since the imports take ten seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
warnings.simplefilter("ignore")
sys.path[:0] = [str(Path(__file__).parents[1])]

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  DTensor imports it at its first use, and every fork would repeat that
import torch.distributed as dist  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tunetool.errors import UsageProblem  # noqa: E402
from tunetool.loading import Progress, ShardPlan, load, load_into  # noqa: E402
from waiting import PATIENCE  # noqa: E402

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
VOCABULARY = 501
"""No number of ranks divides it."""


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    return sorted(ours.keys() ^ theirs.keys()) + [
        name
        for name in ours.keys() & theirs.keys()
        if (ours[name].shape, ours[name].dtype) != (theirs[name].shape, theirs[name].dtype)
        or bits(ours[name]) != bits(theirs[name])
    ]


def parts(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local(tensor).detach().clone() for name, tensor in module.state_dict().items()}


def filled(module: nn.Module, path: Path, theirs: dict[str, torch.Tensor], **more: Any) -> tuple[list[str], Progress]:
    """What differs after ``load_into`` filled the module, whose memory was cleared before."""
    with torch.no_grad():
        for tensor in module.state_dict(keep_vars=True).values():
            local(tensor.detach()).fill_(7)
    came = load_into(module, path, **more)
    return differing(parts(module), theirs), came


# Models of transformers: what it made of the files with tensor parallelism.


def model_of(family: str) -> nn.Module:
    import transformers as hf

    hf.utils.logging.disable_progress_bar()
    hf.utils.logging.set_verbosity_error()
    configs = {
        "llama": lambda: hf.LlamaConfig(**SIZES),
        "qwen": lambda: hf.Qwen2Config(**SIZES, tie_word_embeddings=True),
        "moe": lambda: hf.Qwen3MoeConfig(**SIZES, **EXPERTS),
    }
    torch.manual_seed(3)
    model: nn.Module = hf.AutoModelForCausalLM.from_config(configs[family]()).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def save_model(directory: Path, family: str) -> None:
    """As transformers saves it, in several files, and with the names of the module in ``own``."""
    model = model_of(family)
    model.save_pretrained(directory, max_shard_size="100KB")
    (directory / "own").mkdir()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if family == "qwen":
        del state["lm_head.weight"]
    save_file(state, directory / "own" / "model.safetensors")


EXPERT_STYLES = {
    "model.layers.*.mlp.experts.*.gate_proj": "colwise",
    "model.layers.*.mlp.experts.*.up_proj": "colwise",
    "model.layers.*.mlp.experts.*.down_proj": "rowwise",
}


def transformers_rank(rank: int, world: int, directory: Path, family: str) -> dict[str, Any]:
    import transformers as hf

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    theirs = hf.AutoModelForCausalLM.from_pretrained(directory, tp_plan="auto", device_mesh=mesh)
    expected = {name: local(tensor).detach() for name, tensor in theirs.state_dict().items()}
    stored = [key for file in sorted(directory.glob("*.safetensors")) for key in _keys(file)]
    modules = {name.rpartition(".")[0] for name in stored}
    styles = {key: style for key, style in theirs.tp_plan.items() if any(_is_of(key, name) for name in modules)}
    if family == "moe":
        styles |= EXPERT_STYLES
    came: list[Progress] = []
    ours = load(directory, shard=ShardPlan(styles, rank, world), progress=came.append)
    mine = sum(tensor.nbytes for tensor in ours.values())
    wrong = [f"get_slice: {name}" for name in _differing_slices(directory, ours, rank, world)]
    wrong += [f"transformers: {name}" for name in differing(_fused(ours, family), _without_tied(expected, family))]
    fused, _ = filled(theirs, directory / "own", parts(theirs))
    wrong += [f"load_into: {name}" for name in fused]
    return {
        "wrong": wrong,
        "read": came[-1].read,
        "mine": mine,
        "kinds": sorted({str(_placed(p)) for p in theirs.parameters()}),
    }


def _placed(parameter: Any) -> Any:
    return parameter.placements if isinstance(parameter, DTensor) else None


def _keys(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _is_of(key: str, module: str) -> bool:
    one, two = key.split("."), module.split(".")
    return len(one) == len(two) and all(a in {"*", b} for a, b in zip(one, two, strict=True))


def _without_tied(expected: dict[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in expected.items() if family != "qwen" or name != "lm_head.weight"}


def _differing_slices(directory: Path, ours: dict[str, torch.Tensor], rank: int, world: int) -> list[str]:
    """By the safetensors library, whatever the plan says: the one dimension that is smaller was cut."""
    wrong = []
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  no mapping
                cut, shape = opened.get_slice(name), opened.get_slice(name).get_shape()
                place = [slice(None)] * len(shape)
                for dim, (whole, part) in enumerate(zip(shape, ours[name].shape, strict=True)):
                    if whole != part:
                        assert whole == world * part
                        place[dim] = slice(rank * part, (rank + 1) * part)
                if bits(cut[tuple(place)]) != bits(ours[name]):
                    wrong.append(name)
    return wrong


def _fused(ours: dict[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    """The experts of a layer as one tensor, as transformers holds them: gate and up behind one another."""
    if family != "moe":
        return ours
    fused = {name: tensor for name, tensor in ours.items() if ".experts." not in name}
    for layer in range(SIZES["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp.experts"
        every = range(EXPERTS["num_experts"])
        fused[f"{at}.gate_up_proj"] = torch.stack(
            [torch.cat([ours[f"{at}.{e}.gate_proj.weight"], ours[f"{at}.{e}.up_proj.weight"]]) for e in every]
        )
        fused[f"{at}.down_proj"] = torch.stack([ours[f"{at}.{e}.down_proj.weight"] for e in every])
    return fused


# A module that FSDP2 and tensor parallelism cut.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)
        self.norm = nn.LayerNorm(12)
        self.odd = nn.Parameter(torch.zeros(3, 5, 7))
        self.register_buffer("kept", torch.zeros(4))


def net() -> Net:
    torch.manual_seed(5)
    made = Net()
    with torch.no_grad():
        for tensor in made.state_dict(keep_vars=True).values():
            tensor.normal_()
    return made


def save_net(directory: Path, case: str) -> None:
    save_file(net().state_dict(), directory / "model.safetensors")


def _tensor_parallel(made: nn.Module, mesh: Any) -> None:
    parallelize_module(made, mesh, {"embedding": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()})


def _fsdp(made: nn.Module, world: int) -> None:
    fully_shard(made, mesh=init_device_mesh("cpu", (world,)))


def _fsdp_in_groups(made: nn.Module, world: int) -> None:
    fully_shard(made, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards")))


def _fsdp_over_tensor_parallel(made: Any, world: int) -> None:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    _tensor_parallel(made, mesh["tp"])
    fully_shard(made, mesh=mesh["dp"])


def _two_dims(made: Any, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, world // 2))
    for module, placements in (
        (made.up, [Shard(0), Shard(1)]),
        (made.down, [Shard(0), Shard(0)]),
        (made.embedding, [Shard(1), Replicate()]),
        (made.norm, [Replicate(), Replicate()]),
    ):
        for name, parameter in list(module.named_parameters()):
            some = placements if parameter.dim() > 1 else [Replicate(), Shard(0)]
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, some)))
    made.odd = nn.Parameter(distribute_tensor(made.odd.detach(), mesh, [Shard(2), Shard(1)]))


LAYOUTS: dict[str, Callable[[Any, int], None]] = {
    "fsdp": _fsdp,
    "fsdp in groups": _fsdp_in_groups,
    "fsdp over tp": _fsdp_over_tensor_parallel,
    "two dims": _two_dims,
}


def net_rank(rank: int, world: int, directory: Path, case: str) -> dict[str, Any]:
    made = net()
    LAYOUTS[case](made, world)
    expected = parts(made)
    wrong, came = filled(made, directory / "model.safetensors", expected, buffer_bytes=1 << 16)
    mine = sum(tensor.nbytes for tensor in expected.values())
    wrong += [] if came.bytes == came.total == mine else [f"{came.bytes} of {came.total}, {mine} bytes"]
    kinds = sorted({str(_placed(each)) for each in made.parameters()})
    converted, _ = _in_another_dtype(made, directory, expected)
    wrong += converted
    if case == "fsdp":
        wrong += _from_meta(world, directory, expected)
    return {
        "wrong": wrong,
        "read": came.read,
        "mine": mine,
        "kinds": kinds,
        "refused": _refused(directory, world, made),
    }


def _in_another_dtype(made: nn.Module, directory: Path, expected: dict[str, torch.Tensor]) -> tuple[list[str], Any]:
    """The parameters as float64 are filled with the same values."""
    wide = {name: tensor.double() for name, tensor in expected.items()}
    if any(isinstance(each, DTensor) for each in made.parameters()) and not hasattr(made, "unshard"):
        return filled(made.double(), directory / "model.safetensors", wide)
    return [], None


def _from_meta(world: int, directory: Path, expected: dict[str, torch.Tensor]) -> list[str]:
    with torch.device("meta"):
        made = Net()
    _fsdp(made, world)
    try:
        load_into(made, directory / "model.safetensors")
    except UsageProblem as error:
        wrong = [] if "to_empty" in (error.hint or "") else [f"hint: {error.hint}"]
    else:
        wrong = ["a parameter on meta was filled"]
    made.to_empty(device="cpu")
    load_into(made, directory / "model.safetensors")
    return wrong + [f"from meta: {name}" for name in differing(parts(made), expected)]


def _refused(directory: Path, world: int, made: nn.Module) -> list[str]:
    """What the errors of wrong calls say; the module stays as it is."""
    before, said = parts(made), []
    partial = nn.Module()
    mesh = init_device_mesh("cpu", (world,))
    held = DTensor.from_local(torch.zeros(4), mesh, [Partial()], run_check=False)
    partial.register_buffer("kept", held)
    for call in (
        lambda: load_into(made, directory / "model.safetensors", "cpu"),
        lambda: load_into(made, directory / "model.safetensors", group=dist.group.WORLD),
        lambda: load_into(partial, directory / "model.safetensors", ignore_unused=True),
    ):
        try:
            call()
        except UsageProblem as error:
            said.append(error.message)
        else:
            said.append("")
    assert not differing(parts(made), before)
    return said


def main(root: Path, orders: list[str]) -> None:
    answers: dict[str, Any] = {}
    for case, worlds in (order.split(":") for order in orders):
        directory = root / case
        directory.mkdir()
        (save_net if case in LAYOUTS else save_model)(directory, case)
        answers[case] = {world: _answers(directory, case, int(world)) for world in worlds.split(",")}
    print(json.dumps(answers))


def _answers(directory: Path, case: str, world: int) -> list[Any]:
    ranks = []
    for rank in range(world):
        pid = os.fork()
        if not pid:
            os._exit(_child(rank, world, directory, case))
        ranks.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    assert not any(statuses), statuses
    return [json.loads((directory / f"{world}-{rank}.json").read_text()) for rank in range(world)]


def _child(rank: int, world: int, directory: Path, case: str) -> int:
    signal.alarm(int(PATIENCE))  # ends a rank that waits for another one for ever
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        dist.init_process_group("gloo", init_method=f"file://{directory}/meet-{world}", rank=rank, world_size=world)
        work = net_rank if case in LAYOUTS else transformers_rank
        (directory / f"{world}-{rank}.json").write_text(json.dumps(work(rank, world, directory, case)))
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
