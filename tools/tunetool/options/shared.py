"""Options that several commands share: each is declared once, here."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from tunetool.errors import UsageProblem
from tunetool.measure.metrics import EXPECTABLE, expect_help
from tunetool.measure.pace import QUICK_LOOKS, QUICK_SECONDS, Pace, pace_of
from tunetool.measure.statistics import LOOKS
from tunetool.node.units import UnitError, parse_bandwidth, parse_rate
from tunetool.options.fields import number, option, repeatable
from tunetool.options.values import DIRECTORY, DURATION, JSON_FILE, NAMES, SIZE, TEXT

if TYPE_CHECKING:
    from tunetool.measure.session import Run
    from tunetool.training_python import TrainingPython


def seed(of: str) -> Any:
    """``--seed``."""
    return option("--seed", type=int, default=0, help=f"Seed of {of}.")


def target(text: str, **settings: Any) -> Any:
    """``--target``, a directory on the storage in question."""
    return option("--target", metavar="DIR", help=text, **{"type": DIRECTORY, **settings})


def rounds(default: int | None, **settings: Any) -> Any:
    """``--rounds``: how often each of the compared things is measured."""
    return number(
        "--rounds",
        default=default,
        help="Number of rounds; each round measures every compared thing once. 95 % confidence needs 6.",
        **settings,
    )


def precision() -> Any:
    """``--precision`` of training."""
    return option(
        "--precision",
        type=click.Choice(["auto", "bf16", "fp16"]),
        default="auto",
        help="Number format on GPUs. auto: bf16 where every GPU has it (compute capability 8.0), else fp16 with loss "
        "scaling. CPUs compute in fp32.",
    )


def memory_target(text: str, **settings: Any) -> Any:
    """``--memory-target``, a directory in memory."""
    return option("--memory-target", type=DIRECTORY, help=text, **settings)


def python(hosts: bool = False) -> Any:
    """``--python``; not checked, because it may be a path on other machines. ``hosts``: of a command that takes -i."""
    everywhere = "; with -i a path on every host" if hosts else ""
    node = "each node" if hosts else "this node"
    return option(
        "--python",
        type=TEXT,
        metavar="PATH",
        help=f"Python interpreter with torch and DeepSpeed, for benchmarks also with tunetool{everywhere}. Default: "
        f"the one that /etc/tunetool/node.json names on {node}, else the one that runs tunetool.",
    )


def budget(of: str) -> Any:
    """``--budget`` of a benchmark that measures in rounds."""
    return option(
        "--budget",
        type=DURATION,
        default=None,
        show_default=f"{QUICK_SECONDS / 60:.0f}m; no limit with --rounds or --thorough",
        help=f"Time for {of}, such as `10m`: a round that would end later does not begin.",
    )


def device(text: str) -> Any:
    """``--device``."""
    return option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help=text)


def engines(example: str, few: Sequence[str]) -> Any:
    """``--engines`` of a benchmark that compares several: ``few`` of them without it, see ``InRounds``."""
    help_text = f"Names of the engines to measure, such as `{example}`."
    shown = f"{','.join(few)}; all with --thorough"
    return option("--engines", type=NAMES, default="", metavar="GLOB,...", show_default=shown, help=help_text)


def model_files(text: str, **settings: Any) -> Any:
    """``--model``: a size of Qwen2.5-VL, whose files are made, or a directory with a model's files."""
    return option("--model", type=TEXT, metavar="7b|3b|tiny|PATH", help=text, **settings)


MODEL = "7b|70b|tiny|PATH"


_DECODERS = (
    "3b, 7b, tiny (Qwen2.5-VL), 70b (Llama 3.1), 13b, llama2-7b and llama-tiny (Llama 2), 33b and 65b (LLaMA), "
    "phi3-mini"
)


def model(text: str, **settings: Any) -> Any:
    """``--model``: a name that means the same model everywhere, or the model's files."""
    help_text = (
        f"{text}. A name, a config.json, or a directory with safetensors files. Names: {_DECODERS}, 175b (GPT-3), "
        "mixtral-8x7b."
    )
    return option("--model", type=TEXT, metavar=MODEL, help=help_text, **settings)


def built_model(text: str, **settings: Any) -> Any:
    """``--model`` of a command that builds the model with random weights, which it can for some families alone."""
    help_text = f"{text}. A name, a config.json, or the directory of one. Names: {_DECODERS}."
    return option("--model", type=TEXT, metavar=MODEL, help=help_text, **settings)


def state_bytes(**settings: Any) -> Any:
    """``--state-bytes``: upper bound of the state in bytes."""
    return option(
        "--state-bytes",
        type=SIZE,
        help="Upper bound of the state, such as `2GB`; whole layers are left out until it fits.",
        **settings,
    )


def matrix(default: str, **settings: Any) -> Any:
    """``--matrix`` of ZeRO strategies."""
    return option(
        "--matrix",
        default=default,
        metavar="CELL,...",
        help="Strategies as NODESxGPUS:zSTAGE, with the GPUs of one node. Scaled down to the machines in use.",
        **settings,
    )


def duration_of_sample() -> Any:
    """``--duration`` of one sample of ``verify``."""
    return option("--duration", type=DURATION, default="4s", help="Duration of one sample, such as `10s` or `1m`.")


def expect() -> Any:
    """``--expect`` of ``verify``."""
    return repeatable("--expect", metavar="RATE", help=expect_help())


def goal_settings() -> Any:
    """``--set`` of a goals file."""
    return repeatable(
        "--set",
        metavar="NAME=VALUE",
        help="Value of a {NAME} in the goals file, such as `target=/mnt/data`. Repeatable.",
    )


@dataclass(frozen=True)
class InRuns:
    """Where records are."""

    runs_dir: Path | None = option(
        "--runs-dir",
        type=DIRECTORY,
        help="Directory of the records. Default: /var/lib/tunetool/runs as root, else tunetool/runs in the user's "
        "state directory.",
    )


@dataclass(frozen=True)
class AsJson:
    """``--json``."""

    json_to: str | None = option(
        "--json",
        type=JSON_FILE,
        metavar="FILE|-",
        help="File for the result as JSON, beside what is printed; `-` prints the JSON alone.",
    )


@dataclass(frozen=True)
class Dry:
    """``--dry-run``."""

    dry_run: bool = option(
        "--dry-run", is_flag=True, help="Say what would be done, where and for how long; do nothing."
    )


_SECRET = re.compile(r"""(\w*(?:pass|secret|token)\w*["']?\s*[=:]\s*).*""", re.IGNORECASE | re.DOTALL)


def without_secrets(command: Sequence[str]) -> list[str]:
    """A command line as it may be kept: what a variable of a password or token is set to after ``--`` is left out."""
    words = list(command)
    after = words.index("--") + 1 if "--" in words else len(words)
    return [*words[:after], *(_SECRET.sub(r"\1***", word) for word in words[after:])]


def command_line() -> list[str]:
    """The command as a record keeps it."""
    return without_secrets(sys.argv)


@dataclass(frozen=True)
class Measuring(AsJson, InRuns, Dry):
    """What every command that measures takes."""

    allow_busy: bool = option("--allow-busy", is_flag=True, help="Measure beside a job that uses the drives or GPUs.")

    @property
    def run(self) -> Run:
        """The options as ``tunetool.measure.session`` takes them."""
        from tunetool.measure.session import Run

        return Run(self.runs_dir, self.allow_busy, self.dry_run, command_line())


@dataclass(frozen=True)
class InRounds:
    """What a benchmark takes that measures in rounds, a few of them in a short time where it is not told otherwise."""

    THOROUGH_ROUNDS: ClassVar[int] = LOOKS[0][0]
    """With ``--thorough``."""
    rounds: int | None = rounds(
        None, show_default=f"{QUICK_LOOKS[0]}, then more while figures are undecided and --budget lasts"
    )
    budget: float | None = budget("the whole call")
    thorough: bool = option(
        "--thorough", is_flag=True, help="Measure everything, in a fixed number of rounds, without a limit of time."
    )

    @property
    def pace(self) -> Pace:
        """How many rounds that makes."""
        return pace_of(self.rounds, self.budget, self.thorough, self.THOROUGH_ROUNDS)

    def engines_of(self, named: Sequence[str], few: Sequence[str]) -> Sequence[str]:
        """Globs of the engines to measure: those that are ``named``; else, unless it is to be thorough, ``few``."""
        return named or (() if self.thorough else few)


@dataclass(frozen=True)
class StartingPython(Measuring):
    """What a command takes that runs under tunetool's own Python, and starts the one with torch and DeepSpeed."""

    python: str | None = python()

    @cached_property
    def training_python(self) -> TrainingPython:
        """The Python that is started. Raises ``UsageProblem`` where ``python`` is not a program."""
        from tunetool.training_python import choose

        return choose(self.python)


def parse_expectations(texts: Sequence[str]) -> dict[str, float]:
    """By word of ``--expect``, bytes or requests per second. A bare rate means `read`.

    Raises ``UsageProblem``.
    """
    expected: dict[str, float] = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, separator, rate = part.partition("=")
        if not separator:
            name, rate = "read", part
        if name not in EXPECTABLE:
            raise UsageProblem(
                f"`{name}` is not a direction", "expect `read=50GBps`, `write=25GBps` or `randread-4k=5MIOPS`"
            )
        if name in expected:
            raise UsageProblem(
                f"`--expect {part}` gives the {name} twice", "give each once: `read=50GBps,write=25GBps`"
            )
        expected[name] = _expected_rate(rate, EXPECTABLE[name].unit)
    return expected


def _expected_rate(text: str, unit: str) -> float:
    try:
        value = parse_rate(text) if unit == "1/s" else parse_bandwidth(text)
    except UnitError as error:
        raise UsageProblem(error.message, error.hint) from None
    if not math.isfinite(value):
        raise UsageProblem(f"`{text[:20]}` is too large", "expect a bandwidth such as `50GBps`")
    return value
