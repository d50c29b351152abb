"""The screen's section about GPUDirect Storage: in brief, or every path with every blocker and its remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tunetool.inspect.model import Blocker, Gds, Inspection, Path
from tunetool.report.lines import section, wrapped


def gds_in_short(gds: Gds) -> Iterator[str]:
    """The lines with the path that I/O takes now, and why a better one is not available."""
    lines = [gds.reasons[0] if gds.reasons else gds.mode]
    better = gds.paths[: next((index for index, path in enumerate(gds.paths) if path.mode == gds.mode), 0)]
    shared = _shared_blocker(better)
    if shared:
        lines = [f"{gds.mode}: {shared.found}"]
    else:
        lines += [f"no {path.mode}: {_first_blocker(path)}" for path in better if path.blockers]
    yield from section("gds", lines)
    if len(lines) > 1:
        yield from section("", ["`tunetool inspect --gds` shows every blocker with its remedy"])


def _shared_blocker(paths: Sequence[Path]) -> Blocker | None:
    """The only blocker of every path, such as that there is no GPU; None where they differ."""
    blockers = {path.blockers[0].id if len(path.blockers) == 1 else "" for path in paths}
    return paths[0].blockers[0] if len(blockers) == 1 and "" not in blockers else None


def _first_blocker(path: Path) -> str:
    more = len(path.blockers) - 1
    return path.blockers[0].found + (f" (and {more} more)" if more else "")


def gds_in_full(shown: Inspection) -> Iterator[str]:
    """The lines with every path, the best first, its blockers and their remedies."""
    gds = shown.gds
    yield ""
    shared = _shared_blocker([path for path in gds.paths if path.mode != "off"])
    if shared:
        yield from section("gds", [f"{gds.mode}: {shared.found}", f"do: {shared.remedy}"])
        return
    yield from section("gds", [gds.reasons[0] if gds.reasons else gds.mode])
    for path in gds.paths:
        if path.mode == "off" and gds.mode != "off":
            continue
        yield ""
        now = "  <- the path that I/O takes now" if path.mode == gds.mode else ""
        count = len(path.blockers)
        state = f"blocked by {count}" if count else "nothing in the way"
        yield f"{path.mode}: {state}{now}"
        for blocker in path.blockers:
            yield from wrapped(f"- {blocker.id}: {blocker.found}", 2)
            by = " (role gpudirect_storage does it)" if blocker.curable else ""
            yield from wrapped(f"  do: {blocker.remedy}{by}", 6)
        for note in path.notes:
            yield from wrapped(f"- note: {note}", 2)
    config = [finding for finding in shown.findings if finding.id.startswith("gds.")]
    if config:
        yield ""
        yield "cufile.json:"
        for finding in config:
            yield from wrapped(f"- {finding.found}", 2)
            yield from wrapped(f"  do: {finding.remedy}", 6)
