"""What `bench kv-cache` shows: a table of engines, one of prefixes, and what is slow, why, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tunetool.advise.drive_life import YEAR
from tunetool.advise.node_loss import DAY
from tunetool.bench.kv_cache.figures import FIO, PREFILL
from tunetool.node.units import format_count, format_size
from tunetool.record import CheckResult, Measurement, Record, chosen
from tunetool.view.engines import EngineFigures, counted_by_drives, engine_checks, equality, without_figures
from tunetool.view.figures import figures
from tunetool.view.model import Cells, Notes, Section, Table, View
from tunetool.view.text import interval_of, number, shown

_GOAL = 0.9
"""Of fio's read."""
_ENGINES = (
    "engine",
    "restored, GB/s",
    "interval",
    "of fio",
    "p50, ms",
    "p99, ms",
    "written, GB/s",
    "from drives",
    "written to drives",
    "equal",
)
_PREFIXES = ("tokens", "engine", "p50, ms", "p99, ms", "times the prefill")


def view(record: Record, _: Path | None = None) -> View:
    """What is shown: a line that says what to do, and the tables behind it."""
    engines, left_out = _engines(record)
    prefixes = [row for each in engines for row in _prefixes(record, each.name)]
    sections = [
        Section(
            "engines",
            [Table(_ENGINES, [_row(each) for each in engines]), Notes(list(_notes(record, engines, left_out)))],
        )
    ]
    if prefixes:
        sections.append(Section("time to restore a prefix", [Table(_PREFIXES, prefixes, _PREFIXES[2:])]))
    return View(
        f"KV cache on {record.node.host}",
        head=list(_advice(record, engines)),
        sections=[*sections, *figures(record)],
        checks=True,
    )


def _engines(record: Record) -> tuple[list[EngineFigures], list[CheckResult]]:
    """Those with figures, and the checks of the others."""
    measured, left_out = [], []
    for name, check in engine_checks(record).items():
        known = {each.figure: each for each in chosen(record.measurements, engine=name) if "tokens" not in each.labels}
        if "restore" in known:
            measured.append(EngineFigures(name, known, check))
        elif check.status != "pass":
            left_out.append(check)
    return measured, left_out


def _row(engine: EngineFigures) -> Cells:
    spread = interval_of(engine.figures["restore"])
    return [
        engine.name,
        engine.shown("restore", 1e9),
        f"{number(spread.low / 1e9)} to {number(spread.high / 1e9)}" if spread is not None else "-",
        engine.shown("of_fio"),
        *(engine.shown(name, 1e-3) for name in ("p50", "p99")),
        engine.shown("store", 1e9),
        engine.shown("from_drives"),
        engine.shown("write_amplification"),
        equality(engine) if engine.check is not None and engine.check.status in ("pass", "fail") else "-",
    ]


def _prefixes(record: Record, engine: str) -> Iterator[Cells]:
    by_tokens: dict[int, dict[str, Measurement]] = {}
    for each in chosen(record.measurements, engine=engine):
        if "tokens" in each.labels:
            by_tokens.setdefault(int(each.labels["tokens"]), {})[each.figure] = each
    for tokens, known in sorted(by_tokens.items()):
        times = [shown(known[name].value if name in known else None, 1e-3) for name in ("p50", "p99")]
        versus = known.get("versus_prefill")
        gain = "-" if versus is None else number(versus.value) + ("" if versus.parameters["decided"] else " ?")
        yield [str(tokens), engine, *times, gain]


def _notes(record: Record, engines: Sequence[EngineFigures], left_out: Sequence[CheckResult]) -> Iterator[str]:
    """Lines under the tables: what was stored and asked for, and its evidence."""
    if engines:
        first = engines[0].figures["restore"]
        of = first.parameters
        sizes = {name: format_size(float(of[name])) for name in ("token_bytes", "block_bytes", "store_bytes")}
        yield (
            f"medians of {format_count(len(first.samples or []), 'round')} of {of['requests']} requests; "
            f"`{of['model']}`: {sizes['token_bytes']} of KV for a token; blocks of {of['block_tokens']} tokens, "
            f"{sizes['block_bytes']}; stores of {sizes['store_bytes']}, "
            f"{'more' if of['is_past_memory'] else 'less'} than the memory; {of['threads']} threads on {of['cores']} "
            "cores; p50 and p99: of the requests that found something; from drives, written to drives: their bytes for "
            "each byte that was restored or written; `?`: these rounds do not decide"
        )
        yield from counted_by_drives([each for each in engines if each.figures["restore"].evidence], "restore", "read")
    trace = {each.figure: each for each in chosen(record.measurements, engine=None) if "engine" not in each.labels}
    if "hit_rate" in trace:
        yield (
            f"{trace['hit_rate'].value:.1%} of the prompts' blocks were there; {number(trace['evictions'].value)} "
            "blocks went for each request"
        )
    for engine in engines:
        if (a_day := engine.value("writes_a_day")) is not None:
            years = engine.value("drive_life")
            lasts = f", by which the drives' rating lasts {_lasting(years)}" if years else ""
            yield f"{engine.name}: writes {format_size(a_day)} a day{lasts}"
    yield from without_figures(engines, left_out)


def _lasting(seconds: float) -> str:
    return f"{number(seconds / YEAR)} years" if seconds >= YEAR else f"{number(seconds / DAY)} days"


def _advice(record: Record, engines: Sequence[EngineFigures]) -> Iterator[str]:
    """What is slow, why, and what to do, in one line."""
    ours = [each for each in engines if each.name != FIO and each.is_equal]
    if ours:
        best = max(ours, key=lambda each: each.value("restore") or 0.0)
        yield f"`{best.name}` restores {best.shown('restore', 1e9)} GB/s{_limit(best)}; {_pays(record, best)}"


def _limit(best: EngineFigures) -> str:
    """Whether storage or program bind, by the whole interval of the share of fio's read."""
    share = best.figures.get("of_fio")
    if share is None:
        return ""
    low, high = (share.confidence.low, share.confidence.high) if share.confidence else (share.value, share.value)
    words = f", {number(share.value)} of fio's read by the same blocks at the same depth: "
    if low >= _GOAL:
        storage = "memory" if share.parameters["is_in_memory"] else "the storage"
        return f"{words}{storage} is the limit" + (
            "" if storage == "memory" else "; faster or more drives restore faster"
        )
    if high < _GOAL:
        return f"{words}the program is the limit; try more `--threads`, or larger blocks"
    return f"{words}these rounds do not decide whether that is {_GOAL:.0%}"


def _pays(record: Record, best: EngineFigures) -> str:
    rate = next(iter(chosen(record.measurements, figure=PREFILL)), None)
    if rate is None:
        return "whether that pays depends on the prefill: give `--prefill-rate`"
    against = f"against {number(rate.value)} tokens/s of prefill"
    pays = best.figures.get("pays_from")
    versus = chosen(record.measurements, engine=best.name, figure="versus_prefill")
    if pays is not None and versus and all(each.parameters["decided"] and each.value > 1 for each in versus):
        most = pays.confidence.high if pays.confidence is not None else pays.value
        return f"restoring pays from {most:.0f} tokens on {against}"
    if versus and all(each.parameters["decided"] and each.value < 1 for each in versus):
        return f"restoring does not pay {against}"
    return f"these rounds do not decide whether restoring pays {against}"
