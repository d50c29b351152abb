"""The cells of an experiment (nodes x ranks of a node : ZeRO stage), and which of them fit. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tunetool.errors import UsageProblem

_CELL = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,3}):z([0-3])")


@dataclass(frozen=True, order=True)
class Layout:
    """Numbers of nodes and of ranks on each."""

    nodes: int
    ranks: int
    """Ranks on each node."""

    @property
    def world(self) -> int:
        """Ranks on all nodes."""
        return self.nodes * self.ranks

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks}"


ALONE = Layout(1, 1)


@dataclass(frozen=True, order=True)
class Cell:
    """One ZeRO stage on one layout."""

    layout: Layout
    stage: int

    def __str__(self) -> str:
        return f"{self.layout}:z{self.stage}"

    @property
    def key(self) -> str:
        """The cell's name in measurements."""
        return f"{self.layout}.z{self.stage}"


@dataclass(frozen=True)
class Fitted:
    """The cells to run, and a line for each requested cell that was changed or left out."""

    cells: tuple[Cell, ...]
    notes: tuple[str, ...]
    left_out: tuple[tuple[Cell, str], ...]
    """Cells that are left out, with the reason."""


def parse(text: str) -> list[Cell]:
    """From ``1x1:z2,2x8:z3``. Raises ``UsageProblem`` naming the bad cell, also one that is there twice."""
    cells: list[Cell] = []
    for part in text.split(","):
        match = _CELL.fullmatch(part.strip())
        if match is None:
            raise UsageProblem(
                f"`{part.strip()}` in `--matrix` is not a cell",
                "NODESxGPUS:zSTAGE, such as `2x8:z3` for ZeRO-3 on 2 nodes with 8 GPUs each; stages 0 to 3",
            )
        cell = Cell(Layout(int(match[1]), int(match[2])), int(match[3]))
        if cell in cells:
            raise UsageProblem(f"`{cell}` occurs twice in `--matrix`", "leave out one; `--rounds` repeats every cell")
        cells.append(cell)
    return cells


def fit(asked: Sequence[Cell], nodes: int, ranks: int) -> Fitted:
    """The cells that ``nodes`` with ``ranks`` each can run.

    Fewer GPUs or nodes than asked: the cell is scaled down. One node where several are asked: it is left out, since
    what it would show, the network between nodes, is not there.
    """
    cells: list[Cell] = []
    notes: list[str] = []
    left_out: list[tuple[Cell, str]] = []
    for cell in asked:
        if cell.layout.nodes > 1 and nodes == 1:
            left_out.append((cell, f"it needs {cell.layout.nodes} nodes, and there is one"))
            continue
        scaled = Cell(Layout(min(cell.layout.nodes, nodes), min(cell.layout.ranks, ranks)), cell.stage)
        if scaled != cell and (scaled in cells or scaled in asked):
            left_out.append((cell, f"scaled to what there is, it is `{scaled}`, which is run anyway"))
            continue
        if scaled != cell:
            notes.append(f"{cell} -> {scaled}: there are {nodes} node(s) with {ranks} each")
        cells.append(scaled)
    return Fitted(tuple(cells), tuple(notes), tuple(left_out))


def layouts(cells: Sequence[Cell]) -> list[Layout]:
    """Each layout once, in order; one rank alone first, for comparison with all others."""
    return list(dict.fromkeys([ALONE, *(cell.layout for cell in cells)]))
