"""What a fine-tune is asked: model and data, ranks, training; the workload that every rank gets of it, as JSON, and the
result that the rank leaves. Pure data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tunetool.advise.precision import Asked, refuse_on_cpu
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.training.data.conversations import split_name

RESULT, ERROR = "result.json", "error.json"
"""Names of files in a rank's directory."""

Trainer = Literal["deepspeed", "lightning", "llamafactory"]
Device = Literal["auto", "cpu", "cuda"]
Loader = Literal["parallel", "transformers"]

BATCH_SIZE = 2
IMAGES = 200


@dataclass(frozen=True, kw_only=True)
class Training:
    """How it is trained: what a user asks for, and what every rank gets."""

    trainer: Trainer = "deepspeed"
    zero_stage: int = 2
    epochs: int = 1
    steps: int | None = None
    """Number of optimizer steps, instead of ``epochs``; None: as many as ``epochs`` have."""
    batch_size: int = BATCH_SIZE
    """Samples per rank and step."""
    learning_rate: float = 1e-4
    lora_rank: int = 8
    full: bool = False
    """Train all parameters instead of LoRA's, so that ZeRO's traffic is that of the whole model."""
    loader: Loader = "parallel"
    cold: bool = False
    """Drop model and data from the page cache of each node first."""
    curves: float | None = 1.0
    """Seconds between two samples of the node's and GPUs' counters; None: no curves."""
    workers: int = 2
    """Processes per rank that read and decode images; 0: the rank does it itself, between its steps."""


@dataclass(frozen=True)
class Workload(Training):
    """The fine-tune. Two runs of it on the same number of ranks use the same samples in the same order."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    model: str
    """A directory on the node: config, tokenizer, safetensors."""
    dataset: str
    """A directory on the node in LLaMA-Factory's format: dataset_info.json and the files that it names."""
    entry: str | None = None
    """The name of the dataset in dataset_info.json; None: the only one whose file is there."""
    device: Device = "auto"
    precision: Asked = "auto"
    """``auto``: bf16 where every GPU has it, else fp16 with loss scaling; fp32 on a CPU."""
    seed: int = 0
    checkpoint: str | None = None
    """Directory of a checkpoint at the end, which must not exist; None: no checkpoint."""

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            raise UsageProblem(f"`{self.zero_stage}` is not a ZeRO stage", "ZeRO has the stages 0, 1, 2 and 3")
        wholes = {"epochs": self.epochs, "batch_size": self.batch_size, "lora_rank": self.lora_rank}
        if self.steps is not None:
            wholes["steps"] = self.steps
        for name, value in wholes.items():
            if value < 1:
                raise UsageProblem(f"`{name}` is {value}", "it must be 1 or more")
        refuse_on_cpu(self.precision, self.device)
        if self.workers < 0:
            raise UsageProblem(f"`workers` is {self.workers}", "it must be 0 or more")
        if not self.learning_rate > 0:
            raise UsageProblem(f"`learning_rate` is {self.learning_rate:g}", "it must be more than 0")
        if self.curves is not None and not self.curves > 0:
            raise UsageProblem(f"`curves` is {self.curves:g} seconds", "it must be more than 0")

    def to_json(self) -> str:
        """The workload as JSON, for a rank's command line."""
        return _WORKLOAD.dump_json(self).decode()


@dataclass(frozen=True)
class RankResult:
    """The figures of one rank. Seconds are of its own monotonic clock."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    rank: int
    host: str
    local_rank: int
    device: str
    """``cpu``, or the GPU's name."""
    seconds: dict[str, float]
    """rendezvous, imports, communicator, model_load, engine, first_batch, checkpoint, end_to_end, as far as they
    happened."""
    data_seconds: list[float]
    """Wait for the batch, for each step."""
    step_seconds: list[float]
    """Forward, backward and optimizer until the device has finished them, for each step."""
    losses: list[float]
    learning_rates: list[float]
    tokens: int
    images: int
    model_bytes: int
    """Size of the model's stored tensors."""
    read_bytes: dict[str, dict[str, int]]
    """For ``model`` and ``data``: ``storage`` are the bytes that the kernel fetched from a block device for this rank,
    ``logical`` those that its read calls returned (/proc/self/io: read_bytes, rchar). Mapped pages count in ``storage``
    only."""
    parameters: int
    trainable: int
    versions: dict[str, str]
    load_seconds: list[float] = field(default_factory=list)
    """Reading, decoding and tokenizing of each step's batch, in whichever process, waited for or not."""
    notes: list[str] = field(default_factory=list)
    """Deviations from the workload, for people."""
    precision: str = ""
    """bf16, fp16 or fp32; empty where the rank does not know."""
    skipped_steps: list[int] = field(default_factory=list)
    """Steps without an update, since their gradients overflowed: with fp16 a few are expected, until the loss scale
    fits."""

    @property
    def excused_steps(self) -> frozenset[int]:
        """Steps whose loss may be no number: fp16's loss scaling met an overflow there, and left out their update."""
        return frozenset(self.skipped_steps if self.precision == "fp16" else ())

    def document(self) -> dict[str, Any]:
        """The result as JSON values."""
        return asdict(self)


_WORKLOAD: TypeAdapter[Workload] = TypeAdapter(Workload)
_RESULT: TypeAdapter[RankResult] = TypeAdapter(RankResult)


def workload_from_json(text: str) -> Workload:
    """The workload of a rank's command line. Raises ``UsageProblem`` for an invalid one."""
    try:
        return _WORKLOAD.validate_json(text)
    except ValidationError as error:
        raise UsageProblem(f"`--workload` is not valid: {_first(error)}") from None


def read_result(directory: Path, rank: int) -> RankResult:
    """The result of a rank below ``directory``. Raises ``CannotJudge`` where it is missing or invalid."""
    file = rank_directory(directory, rank) / RESULT
    try:
        return _RESULT.validate_json(file.read_bytes())
    except OSError as error:
        raise CannotJudge(f"rank {rank} left no result: `{file}`: {error.strerror}") from None
    except ValidationError as error:
        raise CannotJudge(f"`{file}` is not a valid result: {_first(error)}") from None


def rank_directory(directory: Path, rank: int) -> Path:
    """The directory with a rank's outputs."""
    return directory / f"rank-{rank}"


def as_environment(workload: Workload, environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` with the variables that the ranks need besides their command line."""
    result = dict(environment)
    # Look-ups of transformers would need a network, which nodes may not have.
    result |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if workload.device != "cuda":
        # Some virtual machines advertise AMX and trap on it: a matrix product ends the rank with SIGILL.
        result.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    return result


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


@dataclass(frozen=True)
class Cluster:
    """The settings that decide where the ranks run."""

    launcher: str = "auto"
    inventory: Path | None = None
    limit: str | None = None
    ansible: Sequence[str] = ()
    """Further options for ansible-playbook, on the way to the hosts."""
    slurm: Sequence[str] = ()
    """``KEY=VALUE`` options for Slurm's batch script."""
    python: str | None = None
    """The interpreter on the hosts; None: the default of ``launch.job.Job``."""
    ranks_per_node: int | None = None
    """None: one per GPU of a node, or one on a node without GPUs."""
    device: Device = "auto"


@dataclass(frozen=True)
class Material:
    """The model and the data of the training."""

    model: str
    """7b, 3b, tiny, or a directory on the nodes."""
    dataset: Path | None = None
    """A directory on the nodes, or ``DIR:NAME``; None: synthetic pictures."""
    images: int = IMAGES
    target: Path | None = None
    """Directory for a model or dataset that must be made; None where neither must."""
    seed: int = 0

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Material:
        """From JSON, in which a path is a text."""
        paths = {name: Path(document[name]) if document[name] is not None else None for name in ("dataset", "target")}
        return cls(**{**document, **paths})

    @property
    def folder(self) -> Path | None:
        """The dataset's directory."""
        return None if self.dataset is None else Path(split_name(str(self.dataset))[0])

    @property
    def entry(self) -> str | None:
        """The name of the dataset in its directory's list; None where none was given."""
        return None if self.dataset is None else split_name(str(self.dataset))[1]

    def __post_init__(self) -> None:
        from tunetool.training.model.reference_model import SIZES

        made = ["the model"] * (self.model in SIZES) + ["pictures"] * (self.dataset is None)
        if made and self.target is None:
            raise UsageProblem(
                f"{' and '.join(made)} must be made, but there is no `--target`",
                "give `--target DIR` on the storage to measure; `--model DIR --dataset DIR` need none",
            )


@dataclass(frozen=True)
class Settings(Training):
    """The settings of the training."""

    checkpoint: Path | None = None
    precision: Asked = "auto"

    def workload(self, model: str, dataset: str, device: Device, seed: int, entry: str | None = None) -> Workload:
        """The workload for the ranks. Raises ``UsageProblem`` for an invalid setting."""
        return Workload(
            model=model,
            dataset=dataset,
            entry=entry,
            device=device,
            precision=self.precision,
            seed=seed,
            checkpoint=str(self.checkpoint) if self.checkpoint is not None else None,
            **{each.name: getattr(self, each.name) for each in fields(Training)},
        )
