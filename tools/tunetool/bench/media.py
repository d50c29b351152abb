"""The directories that a benchmark writes to, each named by the option for its kind of medium."""

from __future__ import annotations

from pathlib import Path

from tunetool.errors import UsageProblem
from tunetool.measure.target import check_target
from tunetool.node.machine.block_stack import BlockStack, read_stack

TARGET, MEMORY_TARGET = "--target", "--memory-target"


def medium_of(option: str, path: Path) -> tuple[Path, BlockStack]:
    """The directory without links, and its medium.

    Raises ``UsageProblem`` where it cannot be written, or the other option is for its medium; ``CannotJudge`` where it
    answers no I/O.
    """
    try:
        check_target(path)
    except UsageProblem as error:
        raise UsageProblem(error.message, f"`{option}` takes a writable directory") from None
    stack = read_stack(str(path.resolve()))
    if stack.in_memory != (option == MEMORY_TARGET):
        other = TARGET if option == MEMORY_TARGET else MEMORY_TARGET
        where = "in memory" if stack.in_memory else "not in memory"
        raise UsageProblem(f"`{path}` lies on {stack.medium}, {where}", f"name it by `{other}`")
    return path.resolve(), stack
