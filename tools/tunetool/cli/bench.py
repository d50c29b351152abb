"""``tunetool bench``: the benchmarks, each made from its folder.

Those that train run under the Python that trains: this very process starts tunetool again by it.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import click

from tunetool.bench.registry import BENCHMARKS, Benchmark
from tunetool.cli.groups import Group
from tunetool.fleet.options import HostsCommand, OnHosts
from tunetool.options.fields import takes
from tunetool.training_python import DEEPSPEED, check_packages, choose


class Benchmarks(Group):
    """The group that makes a benchmark's command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, as ``--help`` lists them."""
        return [each.name for each in BENCHMARKS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """None for another name."""
        return next((_command_of(each) for each in BENCHMARKS if each.name == cmd_name), None)


@click.group("bench", cls=Benchmarks)
def command() -> None:
    """Run a benchmark. Each one writes a record; most also write a page of plots."""


@cache
def _command_of(benchmark: Benchmark) -> click.Command:
    request = benchmark.module("request").Request
    called = takes(request)(lambda given: _run(benchmark, given))
    if not any(each.name == "expect" for each in fields(request)):
        called = _expect(benchmark)(called)
    kind = HostsCommand if issubclass(request, OnHosts) else click.Command
    return click.command(benchmark.name, cls=kind, help=inspect.cleandoc(request.__doc__))(called)


_EXPECTED = "tunetool.expected"


def _expect(benchmark: Benchmark) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """``--expect`` of every benchmark: read before it starts, and kept for its end.

    `reference`, which passes it on to `verify`, has that one's.
    """

    def read(context: click.Context, _: click.Parameter, texts: tuple[str, ...]) -> None:
        if texts:
            from tunetool.accept.goal import parse_expectation

            figures = benchmark.module("request").FIGURES
            context.meta[_EXPECTED] = [parse_expectation(each, figures) for each in texts]

    return click.option(
        "--expect",
        multiple=True,
        expose_value=False,
        callback=read,
        metavar="FIGURE>=BOUND",
        help="Bound of a figure, such as `FIGURE,LABEL=VALUE>=5GBps` or `<=20s`, as in a goals file: judged by the "
        "interval over the rounds. Repeatable.",
    )


def _run(benchmark: Benchmark, request: Any) -> int:
    """Refuse a wrong call, go on under the Python that has what is needed, measure, show."""
    from tunetool.cli.output import finish
    from tunetool.report.progress import best_progress

    if importlib.util.find_spec(f"tunetool.bench.{benchmark.folder}.preflight") is not None:
        check = getattr(benchmark.module("preflight"), "check_call", None)
        if check is not None:
            check(request)
    asked = benchmark.module("request")
    needs = getattr(request, "needs", getattr(asked, "NEEDS", None))
    if needs is not None:
        go_on_under(request.python, needs, getattr(asked, "REQUIRED", True))
    outcome = benchmark.module("run").bench(request, best_progress())
    goals = click.get_current_context().meta.get(_EXPECTED)
    if goals:
        from tunetool.accept.expect import expected

        outcome = expected(outcome, goals, ("bench", benchmark.name))
    return finish(outcome, request.json_to)


_STARTED_BY = "TUNETOOL_TRAINING_PYTHON"
"""Environment variable with the Python that tunetool was started again by: a wrapper may hide that it is the same."""


def go_on_under(named: str | None, needs: Sequence[str] = DEEPSPEED, required: bool = True) -> None:
    """Return where this Python is the one to train with, else start the same command under that one.

    ``named``: what ``--python`` says; ``required``: False to go on here where no Python can train. Raises
    ``UsageProblem`` where it is no program, ``CannotJudge`` where no Python can train here, or the one that is to does
    not start, lacks a package, or has another tunetool.
    """
    chosen = choose(named, needs=needs)
    if chosen.problem is not None and not required:
        return
    chosen.need()
    if chosen.runs_tunetool or os.environ.get(_STARTED_BY) == str(chosen.path):
        os.environ.update(chosen.environment({}))
        return
    environment = chosen.environment({**os.environ, _STARTED_BY: str(chosen.path)})
    check_packages(chosen, needs, environment)
    beside = chosen.path.with_name("tunetool")
    program = [str(beside)] if beside.is_file() else ["-m", "tunetool"]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(chosen.path, [str(chosen.path), *program, *sys.argv[1:]], environment)  # noqa: S606  (no shell, as meant)
