"""What a model needs: its sizes, a table of the ZeRO stages and offloads, and what follows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tunetool.advise import zero
from tunetool.advise.checkpoint import FULL_STATE, WEIGHTS, format_duration
from tunetool.advise.expert_decoder import active, routed
from tunetool.advise.needs import Machines, Need, Saving, advice, checkpoint_bytes
from tunetool.advise.shapes import Model
from tunetool.node.units import format_bandwidth, format_size
from tunetool.report.page import add_number_columns, new_table, print_block
from tunetool.view.text import number


def print_needs(model: Model, found: Sequence[Need], machines: Machines, saving: Saving, console: Console) -> None:
    """Print the sizes, the table and the sentences."""
    print_block(console, f"{model.name}: {model.numel:,} parameters{_experts(model)}", 2)
    sizes = {
        "weights": zero.LOW,
        "gradients": zero.LOW,
        "optimizer (fp32 master weights, Adam's two moments)": zero.STATES * zero.FP32,
    }
    print_block(console, ", ".join(f"{name} {format_size(model.numel * each)}" for name, each in sizes.items()), 2)
    names = (f"weights alone ({WEIGHTS} bytes a parameter)", f"full state ({FULL_STATE})")
    written = (
        f"{name} {format_size(size)}, {format_bandwidth(size / saving.seconds)}"
        for name, size in zip(names, checkpoint_bytes(model), strict=True)
    )
    print_block(console, f"checkpoint, written within {format_duration(saving.seconds)}: {'; '.join(written)}", 2)
    table = new_table()
    table.add_column(f"{machines.gpus} GPUs, {machines.nodes} node(s)", overflow="fold")
    add_number_columns(table, "a GPU", "node memory", "swap files", "read/step", "written/step", "NVMe")
    if saving.step is not None:
        add_number_columns(table, "swap GB/s")
    for each in found:
        row = [each.strategy.name, format_size(round(each.gpu))]
        row += [_or_dash(size) for size in (each.memory, each.swap, each.read, each.written, each.capacity)]
        if saving.step is not None:
            row.append(number(each.bandwidth(saving.step) / 1e9) if each.swap else "-")
        table.add_row(*map(Text, row))
    console.print(table)
    print_block(
        console,
        "a GPU: weights, gradients, optimizer and what ZeRO-3 gathers, without activations and buffers; all other "
        f"columns: of a node; NVMe: swap files and {saving.kept} full checkpoint(s)",
        2,
    )
    for each in found:
        if each.lacks:
            print_block(console, f"{each.strategy.name} does not fit: {'; '.join(each.lacks)}", 2)
    for line in advice(model, found, machines, saving):
        print_block(console, line, 2)


def _experts(model: Model) -> str:
    experts = routed(model)
    if experts is None:
        return ""
    used = active(model)
    of = f"{experts.count} experts in {experts.layers} layers, {experts.numel:,} parameters"
    if used is None:
        return f"; {of}; how many of them a token uses is not known: its config.json is missing"
    chosen = f"{model.experts_per_token} of a layer's {experts.per_layer} experts"
    return f", {used:,.0f} of them used by a token ({chosen}; {of})"


def _or_dash(size: float) -> str:
    return format_size(round(size)) if size else "-"
