"""How long it takes to say what differs between a thousand nodes.

    .venv/bin/python perf/inspect_fleet.py [--nodes 1000] [--rounds 5]

Made nodes of eight drives and eight GPUs (docs/machines/h100-made.json), every fiftieth with another kernel and every
hundredth with a slow link. Timed is the comparison alone, from inspections in memory; it is one thread, so that its CPU
time is what it takes beside nothing else. Goal: a thousand nodes take a second at most. Ends with 1 where it is missed,
with 3 where that is not decided.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from entry import program
from goals import line, status
from tunetool.inspect.collect import inspect
from tunetool.inspect.fleet_compare import compare
from tunetool.inspect.model import Inspection
from tunetool.inspect.source import opened

SECONDS = 1.0
MACHINE = Path(__file__).resolve().parents[1] / "docs/machines/h100-made.json"


def nodes(count: int) -> dict[str, Inspection]:
    with opened(MACHINE) as source:
        text = inspect(source).model_dump_json(by_alias=True)
    made = {}
    for number in range(count):
        # Parsed one by one, as they arrive: nothing is shared between hosts.
        shown = Inspection.model_validate_json(text)
        if number % 50 == 0:
            shown = shown.model_copy(update={"host": shown.host.model_copy(update={"kernel": "6.8.0"})})
        if number % 100 == 0:
            drive = shown.drives[-1]
            slow = drive.model_copy(update={"link": drive.link.model_copy(update={"speed_gts": 16.0})})
            shown = shown.model_copy(update={"drives": [*shown.drives[:-1], slow]})
        made[f"n{number}"] = shown
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    made = nodes(options.nodes)
    taken = []
    for _ in range(options.rounds):
        began = time.process_time()
        comparison = compare(made)
        taken.append(time.process_time() - began)
    assert [each.fact for each in comparison.differences] == ["drives.link", "host.kernel"], comparison.differences
    title = f"{options.nodes} nodes, {comparison.facts} facts: seconds of the CPU"
    return status([line(title, taken, SECONDS, at_least=False)])


if __name__ == "__main__":
    program(main)
