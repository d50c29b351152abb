"""What is an I/O setting worth here? Each alone against what the machine has now, interleaved, proven, put back.

    sudo .venv/bin/python perf/io_tuning.py --target DIR [--set scheduler=none --set nr_requests=64 ...]
    .venv/bin/python perf/io_tuning.py --lab node1 --target /mnt/nvme_raid0     the same in a virtual node
    sudo .venv/bin/python perf/io_tuning.py --restore                           after kill -9

Pairs of default and candidate in an order drawn from --seed; fio by tunetool's own driver; bytes held against the
drives' counters. What was touched is put back at the end, on Ctrl-C and on kill -TERM. Before the first change it is
written to a file, from which --restore puts it back. The table goes to stdout, and to --markdown and --json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from io_settings import CHOSEN, Options, run
from put_back import orderly_end, restore
from tunetool.errors import TunetoolError
from tunetool.measure.statistics import DIFFERENCE_METHOD
from tunetool.node.machine.block_stack import CountersChanged


def markdown(document: dict[str, Any]) -> str:
    lines = [
        "| setting | default | tried | workload | default median | ratio: median of the pairs (95 %) | conclusion |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        rate = row["default_median"]
        figure = f"{rate / 1e3:.1f} kIOPS" if row["unit"] == "1/s" else f"{rate / 1e9:.2f} GB/s"
        lines.append(
            f"| {row['setting']} | {row['default']} | {row['value']} | {row['workload']} | {figure} | "
            f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f}) | {row['conclusion']} |"
        )
    load = f"load {document['load_before']:.2f} before, {document['load_after']:.2f} after, {document['cpus']} CPUs"
    lines += ["", f"{document['medium']}, Linux {document['kernel']}, fio {document['fio']}; {load}."]
    lines += [
        f"{document['pairs']} pairs, seed {document['seed']}, samples of {document['duration']:g} s; "
        f"{DIFFERENCE_METHOD}."
    ]
    lines += [f"Not tried: {'; '.join(document['left_out'])}."] if document["left_out"] else []
    return "\n".join(lines) + "\n"


def in_lab(node: str, wanted: Options) -> dict[str, Any]:
    """The same program on a virtual node, by the tunetool that is installed there."""
    argv = ["--target", str(wanted.target), "--pairs", str(wanted.pairs), "--seed", str(wanted.seed)]
    argv += ["--duration", str(wanted.duration), "--size-mib", str(wanted.size_mib)]
    argv += [word for text in wanted.candidates for word in ("--set", text)]
    argv += ["--allow-busy"] if wanted.allow_busy else []
    # The program's link leads into the venv whose Python has it.
    python = '"$(dirname "$(readlink -f /opt/tunetool/bin/tunetool)")/python"'
    program = f"exec {python} - {shlex.join([*argv, '--json', '-'])}"
    command = [sys.executable, "-m", "tunetool", "lab", "ssh", node, "--", program]
    # Interrupted here, the program there loses its connection, and puts everything back when it next says something.
    with orderly_end():
        done = subprocess.run(command, input=in_one_file(), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    table: dict[str, Any] = json.loads(done.stdout)
    return table


def in_one_file() -> str:
    """This program and the modules beside it as one text for a Python's standard input: the node has none of them."""
    parts = ["import sys, types"]
    for name in ("put_back", "io_settings"):
        source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        parts.append(f"sys.modules[{name!r}] = types.ModuleType({name!r})")
        parts.append(f"exec(compile({source!r}, '{name}.py', 'exec'), sys.modules[{name!r}].__dict__)")
    program = Path(__file__).read_text(encoding="utf-8")
    parts.append(f"exec(compile({program!r}, 'io_tuning.py', 'exec'), globals())")
    return "\n".join(parts) + "\n"


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="directory on the storage to measure")
    parser.add_argument("--set", action="append", metavar="SETTING=VALUE", help="a candidate; default: the chosen set")
    parser.add_argument(
        "--pairs", type=int, default=6, choices=(6, 9, 12, 15), help="6 are the fewest that reach 95 %%"
    )
    parser.add_argument("--duration", type=float, default=1.5, help="seconds of a sample")
    parser.add_argument("--size-mib", type=int, default=1024, help="of all files together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--allow-busy", action="store_true")
    parser.add_argument("--lab", metavar="NODE", help="measure on this virtual node")
    parser.add_argument("--restore", action="store_true", help="put back what a killed run left")
    parser.add_argument("--json", help="file, or - for stdout")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(argv)
    if not (options.target or options.restore):
        parser.error("--target DIR or --restore")
    return options


def main() -> int:
    options = parsed(sys.argv[1:])
    wanted = Options(
        target=options.target,
        candidates=options.set or CHOSEN,
        pairs=options.pairs,
        duration=options.duration,
        size_mib=options.size_mib,
        seed=options.seed,
        allow_busy=options.allow_busy,
    )
    try:
        if options.lab:
            document = in_lab(options.lab, wanted)
        elif options.restore:
            print(restore())
            return 0
        else:
            document = run(wanted, lambda line: print(line, file=sys.stderr, flush=True))
    except TunetoolError as error:
        print(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return int(error.exit_code)
    except CountersChanged as error:
        print(f"error: the drives changed under the measurement: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("interrupted; everything is put back", file=sys.stderr)
        return 130
    if options.json == "-":
        print(json.dumps(document, indent=2))
        return 0
    if options.json:
        Path(options.json).write_text(json.dumps(document, indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(document))
    print(markdown(document), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
