"""What every rank of a fine-tune is told, and what it tells back. Pure data; JSON at both ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tunetool.errors import CannotJudge, UsageProblem

RESULT, ERROR = "result.json", "error.json"
"""In a rank's own directory."""

Trainer = Literal["deepspeed", "lightning", "llamafactory"]
Device = Literal["auto", "cpu", "cuda"]
Loader = Literal["parallel", "transformers"]


@dataclass(frozen=True)
class Workload:
    """The fine-tune. Two runs with the same one, on as many ranks, see the same samples in the same order."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    model: str
    """A directory on the node: config, tokenizer, safetensors."""
    dataset: str
    """A directory on the node, as LLaMA-Factory has it: dataset_info.json beside what it names."""
    trainer: Trainer = "deepspeed"
    zero_stage: int = 2
    epochs: int = 1
    steps: int | None = None
    """Exactly so many optimizer steps, however many epochs that is; None: as ``epochs`` says."""
    batch_size: int = 2
    """Samples of one rank in one step."""
    learning_rate: float = 1e-4
    lora_rank: int = 8
    full: bool = False
    """Train all parameters, without LoRA: what ZeRO must then move is the whole model."""
    device: Device = "auto"
    seed: int = 0
    loader: Loader = "parallel"
    cold: bool = False
    """Drop model and data from the page cache of each node first."""
    checkpoint: str | None = None
    """A directory to save to at the end; it must not exist. None: nothing is saved."""
    curves: float | None = 1.0
    """Seconds between two samples of the node's and GPUs' counters; None: no curves."""
    workers: int = 2
    """Processes that read and decode images for each rank; 0: the rank itself, between its steps."""

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            raise UsageProblem(f"`{self.zero_stage}` is no ZeRO stage", "ZeRO has the stages 0, 1, 2 and 3")
        wholes = {"epochs": self.epochs, "batch_size": self.batch_size, "lora_rank": self.lora_rank}
        if self.steps is not None:
            wholes["steps"] = self.steps
        for name, value in wholes.items():
            if value < 1:
                raise UsageProblem(f"`{name}` is {value}", "it must be 1 or more")
        if self.workers < 0:
            raise UsageProblem(f"`workers` is {self.workers}", "it must be 0 or more")
        if not self.learning_rate > 0:
            raise UsageProblem(f"`learning_rate` is {self.learning_rate:g}", "it must be more than 0")
        if self.curves is not None and not self.curves > 0:
            raise UsageProblem(f"`curves` is {self.curves:g} seconds", "it must be more than 0")

    def to_json(self) -> str:
        """For a rank's command line."""
        return _WORKLOAD.dump_json(self).decode()


@dataclass(frozen=True)
class RankResult:
    """What one rank did. Seconds are of its own monotonic clock."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    rank: int
    host: str
    local_rank: int
    device: str
    """``cpu``, or the GPU's name."""
    seconds: dict[str, float]
    """rendezvous, imports, communicator, model_load, engine, first_batch, checkpoint, end_to_end; what was done."""
    data_seconds: list[float]
    """Of each step: how long it waited for its batch."""
    step_seconds: list[float]
    """Of each step: forward, backward and optimizer, until the device had done them."""
    losses: list[float]
    learning_rates: list[float]
    tokens: int
    images: int
    model_bytes: int
    """What the files of the model hold."""
    read_bytes: dict[str, dict[str, int]]
    """``model`` and ``data``: ``storage`` is what the kernel fetched from a block device for this rank, ``logical``
    what its read calls returned (/proc/self/io: read_bytes, rchar). Mapped pages count in ``storage`` alone."""
    parameters: int
    trainable: int
    versions: dict[str, str]
    load_seconds: list[float] = field(default_factory=list)
    """Of each step's batch: reading, decoding and tokenizing it, by whoever did, waited for or not."""
    notes: list[str] = field(default_factory=list)
    """What went otherwise than asked, for people."""

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


_WORKLOAD: TypeAdapter[Workload] = TypeAdapter(Workload)
_RESULT: TypeAdapter[RankResult] = TypeAdapter(RankResult)


def workload_from_json(text: str) -> Workload:
    """Raises ``UsageProblem``."""
    try:
        return _WORKLOAD.validate_json(text)
    except ValidationError as error:
        raise UsageProblem(f"`--workload` is none: {_first(error)}") from None


def read_result(directory: Path, rank: int) -> RankResult:
    """What rank ``rank`` left in ``directory``. Raises ``CannotJudge``."""
    file = rank_directory(directory, rank) / RESULT
    try:
        return _RESULT.validate_json(file.read_bytes())
    except OSError as error:
        raise CannotJudge(f"rank {rank} left no result: `{file}`: {error.strerror}") from None
    except ValidationError as error:
        raise CannotJudge(f"`{file}` is no result: {_first(error)}") from None


def rank_directory(directory: Path, rank: int) -> Path:
    """Where a rank's outputs lie."""
    return directory / f"rank-{rank}"


def as_environment(workload: Workload, environment: Mapping[str, str]) -> dict[str, str]:
    """What the ranks need beside their command line."""
    told = dict(environment)
    # DeepSpeed's and transformers' own reporting and look-ups would need a network that nodes may not have.
    told |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if workload.device != "cuda":
        # Some virtual machines advertise AMX and trap on it: a matrix product ends the rank with SIGILL.
        told.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    return told


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
