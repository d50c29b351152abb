"""Explains each parameter from DeepSpeed's source, with the curve measured here as text and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from xml.sax.saxutils import escape

from tunetool.errors import UsageProblem
from tunetool.measure import Direction
from tunetool.node.common.files import replace_file
from tunetool.node.units import format_size_binary
from tunetool.record import Measurement, Record, chosen
from tunetool.tune.settings import DEFAULTS

TEXTS: Mapping[str, str] = {
    "block_size": (
        "Bytes of one request. Each thread cuts its part of a tensor into blocks of this size and gives each to the "
        "kernel as one asynchronous request (`io_prep_generator` in csrc/aio/common/deepspeed_aio_utils.cpp). Small "
        "blocks cost a system call's work each; large ones leave drives without work where a tensor has fewer blocks "
        "than there are drives. md RAID0 cuts a block again at every chunk."
    ),
    "queue_depth": (
        "Requests that each thread keeps in flight (`aio_context` in csrc/aio/common/deepspeed_aio_types.cpp makes a "
        "queue of this size for each thread, and one more for the handle). So a node has (threads + 1) x depth x "
        "processes of them, and `fs.aio-max-nr` must allow that: DeepSpeed does not look whether it got its queue, and "
        "aborts at the first request. More than a tensor has blocks is never used."
    ),
    "intra_op_parallelism": (
        "Threads of one transfer. Each moves an equal part of the tensor by a queue of its own "
        "(csrc/aio/py_lib/deepspeed_py_io_handle.cpp), so that a tensor's size must be a multiple of 512 x this. "
        "ds_nvme_tune writes it as `num_threads` and older texts as `thread_count`: DeepSpeed ignores both in silence."
    ),
    "single_submit": (
        "One `io_submit` for each request instead of one for a whole batch (`_do_io_submit_singles` in "
        "csrc/aio/common/deepspeed_aio_common.cpp): more system calls, but the first request is on its way sooner."
    ),
    "overlap_events": (
        "true: whenever one request is done the next one is submitted, the queue stays full "
        "(`do_aio_operation_overlap`). false: a batch of `queue_depth` is submitted and waited for as a whole, then "
        "the next (`do_aio_operation_sequential`): the drives run dry at each batch's end."
    ),
    "use_gds": (
        "true: transfers between GPU memory and storage go by cuFile (`gds_handle`), without the copy through pinned "
        "memory. It needs a file system and drives that cuFile takes, and CUDA; elsewhere DeepSpeed's process ends."
    ),
}
_COLOURS: Mapping[str, str] = {"read": "#1f6feb", "write": "#d1603d"}
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 560, 300, 60, 40


@dataclass(frozen=True)
class Point:
    """A value of a parameter, and the speeds with it."""

    value: int | bool
    best: float
    """Median of the fastest setting that has it, bytes per second."""
    typical: float
    """Median over the settings that have it."""
    settings: int


def curve(measurements: Sequence[Measurement], name: str, direction: Direction) -> list[Point]:
    """The speeds with each value of parameter ``name``."""
    by_value: dict[int | bool, list[float]] = {}
    for each in chosen(measurements, "bandwidth", subject="tune", direction=direction):
        value = each.parameters[name]
        assert isinstance(value, int)  # noqa: S101  (numbers and booleans alone make a block)
        by_value.setdefault(value, []).append(each.value)
    return [Point(value, max(rates), median(rates), len(rates)) for value, rates in sorted(by_value.items())]


def check_explain(directory: Path) -> None:
    """Raises ``UsageProblem`` if the directory could not be written; called before anything is measured."""
    if directory.exists() and not directory.is_dir():
        raise UsageProblem(f"`{directory}` is not a directory", "`--explain` takes a directory, and creates it")


def explain(record: Record, directory: Path) -> Path:
    """Write ``explained.md`` and a plot for each varied parameter. Returns the path of the text."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [
        "# DeepSpeed's `aio` settings, as measured here",
        "",
        f"`{record.target}` on {record.node.host}, {record.finished:%Y-%m-%d}; record {record.id}. For each value: the "
        "fastest setting that has it, and the median of all that have it. Slow settings were measured less often than "
        "fast ones.",
    ]
    for name, default in DEFAULTS.block().items():
        curves = {direction: curve(record.measurements, name, direction) for direction in ("read", "write")}
        lines += ["", f"## `{name}`", "", f"{TEXTS[name]} DeepSpeed's default: `{shown(name, default)}`."]
        if max(len(points) for points in curves.values()) < 2:
            lines += ["", "Not varied in this run."]
            continue
        replace_file(str(directory / f"{name}.svg"), plot(name, curves))
        lines += ["", "```text", *table(name, curves), "```", "", f"![{name}]({name}.svg)"]
    path = directory / "explained.md"
    replace_file(str(path), "\n".join(lines) + "\n")
    return path


def shown(name: str, value: int | bool) -> str:
    """The value as a person writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return format_size_binary(value) if name == "block_size" else str(value)


def table(name: str, curves: Mapping[str, Sequence[Point]]) -> list[str]:
    """The curves as text, with bars."""
    top = max(point.best for points in curves.values() for point in points)
    lines = [f"{'':12} {'':5} {'best':>7} {'typical':>8}  GB/s"]
    for direction, points in curves.items():
        for point in points:
            bar = "#" * round(40 * point.best / top)
            rates = f"{point.best / 1e9:7.3f} {point.typical / 1e9:8.3f}"
            lines.append(f"{shown(name, point.value):>12} {direction:5} {rates}  {bar}")
    return lines


def plot(name: str, curves: Mapping[str, Sequence[Point]]) -> str:
    """The curves as SVG: solid for the best, dashed for the typical speed."""
    values = sorted({point.value for points in curves.values() for point in points})
    top = max(point.best for points in curves.values() for point in points) * 1.1
    step = (_WIDTH - _LEFT - 40) / max(1, len(values) - 1)
    across = {value: _LEFT + 20 + step * position for position, value in enumerate(values)}
    floor = _HEIGHT - _BOTTOM

    def up(rate: float) -> float:
        return floor - (floor - 20) * rate / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="14">{escape(name)}: GB/s</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        rate = top / 1.1 * share
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{up(rate):.1f}" y2="{up(rate):.1f}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{up(rate) + 4:.1f}" text-anchor="end">{rate / 1e9:.2f}</text>'
        )
    for value, x in across.items():
        label = escape(shown(name, value))
        parts.append(f'<text x="{x:.1f}" y="{floor + 18}" text-anchor="middle">{label}</text>')
    for position, (direction, points) in enumerate(curves.items()):
        colour = _COLOURS[direction]
        for rates, style in (([point.best for point in points], ""), ([p.typical for p in points], "4 3")):
            line = " ".join(
                f"{across[point.value]:.1f},{up(rate):.1f}" for point, rate in zip(points, rates, strict=True)
            )
            dash = f' stroke-dasharray="{style}"' if style else ""
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        legend = f"{direction}: best (dashed: typical)"
        parts.append(f'<text x="{_LEFT + 190 * position}" y="{_HEIGHT - 4}" fill="{colour}">{legend}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
