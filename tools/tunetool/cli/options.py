"""Options that several commands share: each is declared once, here.

A command's options are a dataclass whose fields say how they are written on the command line; ``takes`` gives the
command one object of it. Groups of shared options are dataclasses to inherit from. ``--help`` lists a class's own
options first, then those of its bases.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tunetool.cli.values import DIRECTORY, DURATION, JSON_FILE, NAMES, PATH, SIZE, TEXT
from tunetool.errors import UsageProblem

if TYPE_CHECKING:
    from tunetool.fleet.playbook import HostSelection
    from tunetool.measure.session import Run

OptionsT = TypeVar("OptionsT")
_KEY = "click"


def option(*names: str, **settings: Any) -> Any:
    """A field that is an option; ``settings`` are those of ``click.option``. ``--help`` shows a default."""
    if "default" in settings:
        settings.setdefault("show_default", True)
    return field(metadata={_KEY: functools.partial(click.option, *names, **settings)})


def repeatable(*names: str, **settings: Any) -> Any:
    """A field that is an option which may be given several times."""
    return option(*names, multiple=True, **settings)


def argument(metavar: str, **settings: Any) -> Any:
    """A field that is a positional argument."""
    return field(metadata={_KEY: functools.partial(click.argument, metavar=metavar, **settings)})


def takes(options: type[OptionsT]) -> Callable[[Callable[[OptionsT], int]], Callable[..., int]]:
    """Let a command take ``options``, a dataclass; its ``check``, if it has one, is called first."""

    def decorate(function: Callable[[OptionsT], int]) -> Callable[..., int]:
        @functools.wraps(function)
        def called(**values: Any) -> int:
            given = options(**values)
            check = getattr(given, "check", None)
            if check is not None:
                check()
            return function(given)

        decorated: Callable[..., int] = called
        for each in reversed(_in_order(options)):
            make = each.metadata[_KEY]
            # The field's name is the parameter's, whatever the option is called.
            decorated = functools.partial(make.func, each.name, *make.args, **make.keywords)()(decorated)
        return decorated

    return decorate


def _in_order(options: type[Any]) -> list[Any]:
    """The fields of the class itself, then those of its bases."""
    by_name = {each.name: each for each in fields(options)}
    names = [name for base in options.__mro__ for name in vars(base).get("__annotations__", {})]
    return [by_name[name] for name in dict.fromkeys(names) if name in by_name]


def number(*names: str, least: int = 1, **settings: Any) -> Any:
    """A field that is an option with a whole number, not below ``least``."""
    return option(*names, type=click.IntRange(min=least), metavar="N", **settings)


def seed(of: str) -> Any:
    """``--seed``."""
    return option("--seed", type=int, default=0, help=f"Seed of {of}.")


def target(text: str, **settings: Any) -> Any:
    """``--target``, a directory on the storage in question."""
    return option("--target", metavar="DIR", help=text, **{"type": DIRECTORY, **settings})


def rounds(default: int) -> Any:
    """``--rounds``: how often each of the compared things is measured."""
    return number(
        "--rounds",
        default=default,
        help="Number of rounds; each round measures every compared thing once. 95 % confidence needs 6.",
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


def device(text: str) -> Any:
    """``--device``."""
    return option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help=text)


def engines(example: str) -> Any:
    """``--engines`` of a benchmark that compares several."""
    help_text = f"Names of the engines to measure, such as `{example}`."
    return option("--engines", type=NAMES, default="*", metavar="GLOB,...", help=help_text)


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


def matrix(default: str) -> Any:
    """``--matrix`` of ZeRO strategies."""
    return option(
        "--matrix",
        default=default,
        metavar="CELL,...",
        help="Strategies as NODESxGPUS:zSTAGE, with the GPUs of one node. Scaled down to the machines in use.",
    )


def duration_of_sample() -> Any:
    """``--duration`` of one sample of ``verify``."""
    return option("--duration", type=DURATION, default="4s", help="Duration of one sample, such as `10s` or `1m`.")


def expect() -> Any:
    """``--expect`` of ``verify``."""
    return repeatable(
        "--expect",
        metavar="RATE",
        help="Expected speed: `50GBps` (sequential read) or `read=50GBps,write=25GBps`; with --level full also "
        "`randread-4k=5MIOPS`, `randread-64k`, `randread-1m`. Default: the manifest's.",
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


def command_line() -> list[str]:
    """The command as a record keeps it."""
    from tunetool.fleet.ansible_options import without_secrets

    return without_secrets(sys.argv)


@dataclass(frozen=True)
class Measuring(AsJson, InRuns, Dry):
    """What every command that measures takes."""

    allow_busy: bool = option("--allow-busy", is_flag=True, help="Measure beside a job that uses the drives or GPUs.")

    def run(self) -> Run:
        """The options as ``tunetool.measure.session`` takes them."""
        from tunetool.measure.session import Run

        return Run(self.runs_dir, self.allow_busy, self.dry_run, command_line())


INVENTORY = "What follows `--` goes to ansible-playbook, such as `-- --ask-become-pass`."
"""Of ``-i``, in every command."""


@dataclass(frozen=True)
class OnHosts:
    """The hosts of an inventory instead of this node. Its commands are of the class ``HostsCommand``."""

    inventory: Path | None = option(
        "-i",
        "--inventory",
        type=PATH,
        metavar="INVENTORY",
        help=f"Ansible inventory: run on its hosts, not here. {INVENTORY}",
    )
    limit: str | None = option("--limit", metavar="PATTERN", help="With -i: only the hosts that match.")
    ansible: tuple[str, ...] = argument("[-- ANSIBLE_OPTION...]", nargs=-1, type=click.UNPROCESSED)

    def ansible_options(self) -> tuple[str, ...]:
        """The options for Ansible. Passwords are asked for now; what holds them ends with the command.

        Raises ``UsageProblem``.
        """
        if not self.ansible:
            return ()
        from tunetool.fleet.ansible_options import answered

        def ask(prompt: str) -> str:
            password: str = click.prompt(prompt, hide_input=True, default="", show_default=False, err=True)
            return password

        return click.get_current_context().with_resource(answered(self.ansible, ask))


class HostsCommand(click.Command):
    """A command whose options are ``OnHosts``. Only what follows ``--`` goes to Ansible: anything else is a mistake."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises ``UsageProblem`` where there are words for Ansible and no inventory."""
        after = args[args.index("--") + 1 :] if "--" in args else []
        rest = super().parse_args(ctx, args)
        words = ctx.params.get("ansible") or ()
        if len(words) > len(after):
            extra = words[: len(words) - len(after)]
            raise click.UsageError(f"Got unexpected extra argument{'s' * (len(extra) > 1)} ({' '.join(extra)})", ctx)
        if words and ctx.params.get("inventory") is None:
            raise UsageProblem("what follows `--` is for Ansible, and there is no inventory", "add `-i INVENTORY`")
        return rest


@dataclass(frozen=True)
class OnManyHosts(OnHosts):
    """The hosts of an inventory, several at the same time."""

    forks: int | None = number("--forks", help="With -i: number of hosts at the same time. Default: all, up to 100.")

    def selection(self, inventory: Path) -> HostSelection:
        """The hosts, and how Ansible reaches them. Raises ``UsageProblem``."""
        from tunetool.fleet.playbook import HostSelection

        return HostSelection(inventory, self.limit, self.forks, self.ansible_options())


def no_become() -> Any:
    """``--no-become``."""
    return option("--no-become", is_flag=True, help="With -i: run as the user who logs in, not as root.")


def need_inventory(inventory: Path | None, **given: Any) -> None:
    """Raises ``UsageProblem`` if an option for hosts is given without an inventory."""
    for name, value in given.items():
        if inventory is None and value not in (None, False):
            raise UsageProblem(f"`--{name.replace('_', '-')}` needs an inventory", "add `-i INVENTORY`")
