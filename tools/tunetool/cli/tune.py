"""``tunetool tune``: read the call, search, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from tunetool.cli import ds_config


@click.command("tune")
@click.option(
    "--target", required=True, metavar="DIR", help="A directory on the storage that DeepSpeed will offload to."
)
@click.option(
    "--budget", default="60s", show_default=True, metavar="TIME", help="For everything, such as `60s` or `5m`."
)
@click.option("-o", "--output", metavar="FILE", help="Write the `aio` block there, once DeepSpeed read it back.")
@click.option("--json", "json_to", metavar="FILE|-", help="Also write the record to FILE; `-`: it alone on stdout.")
@click.option("--space", metavar="FILE", help="JSON: the values of each key that are tried. Default: ds_nvme_tune's.")
@click.option(
    "--mix",
    "mix_text",
    default="read=1,write=1",
    show_default=True,
    metavar="MIX",
    help="Bytes read for bytes written by the job that the block is for: `write=1` for checkpoints.",
)
@click.option("--exhaustive", is_flag=True, help="Six rounds of every setting, however long that takes.")
@click.option("--explain", metavar="DIR", help="What each parameter does, with the curves measured here, into DIR.")
@click.option(
    "--driver",
    type=click.Choice(["deepspeed", "fio"]),
    default="deepspeed",
    show_default=True,
    help="fio asks the same of the storage where torch cannot start.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where the data is: memory, or GPU memory by a buffer that CUDA pinned.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="So many at the same time, as ranks of a node do.",
)
@click.option("--io-size", metavar="SIZE", help="Of one transfer: `1G` is 2^30. Default: by the storage's speed.")
@click.option("--python", metavar="PATH", help="Whose torch and DeepSpeed. Default: tunetool's.")
@click.option("--store-vars", metavar="DIR", help="Also keep the result as variables in DIR, such as `group_vars/all`.")
@click.option("--runs-dir", metavar="DIR", help="Where records are kept.")
@click.option("--allow-busy", is_flag=True, help="Measure beside a job that uses the drives or GPUs.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order in which settings are tried.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, how long and where; do nothing.")
@ds_config.options
def command(
    target: str,
    budget: str,
    output: str | None,
    json_to: str | None,
    space: str | None,
    mix_text: str,
    exhaustive: bool,
    explain: str | None,
    driver: str,
    device: str,
    processes: int,
    io_size: str | None,
    python: str | None,
    store_vars: str | None,
    runs_dir: str | None,
    allow_busy: bool,
    seed: int,
    dry_run: bool,
    **asked: Any,
) -> int:
    """The best settings of DeepSpeed's `aio` block for this storage, within a minute.

    Rounds of short transfers drop what is significantly slower; what is left is held against DeepSpeed's own default in
    pairs. "No significant difference" is a result: the default is written. Every sample is held against the drives'
    counters. Exit codes: 0 found, 2 the call was wrong, 3 it could not be measured or proven, and nothing was written.
    """
    from tunetool.bench.ds_io import parse_io_size
    from tunetool.cli.verify import check_json, check_python, no_empty_paths, parse_duration, write_json
    from tunetool.report.table import table_console
    from tunetool.report.tune import best_view, print_tune
    from tunetool.tune import run
    from tunetool.tune.explain import check_explain
    from tunetool.tune.explain import explain as write_explanation
    from tunetool.tune.goals import parse_mix
    from tunetool.tune.request import Request
    from tunetool.tune.space import SWEEP, read_space, settings_of
    from tunetool.tune.store import check_store, store

    paths = {"--target": target, "-o": output, "--json": json_to, "--space": space, "--runs-dir": runs_dir}
    no_empty_paths({**paths, "--python": python, "--explain": explain, "--store-vars": store_vars})
    check_json(json_to)
    config = ds_config.read(asked, target, output, python)
    if config is not None and config[1] is not None:
        return ds_config.write(config[0], config[1], dry_run)
    request = Request(
        target=Path(target),
        space=settings_of(read_space(Path(space)) if space is not None else SWEEP),
        mix=parse_mix(mix_text),
        budget=parse_duration(budget),
        # With --ds-config the block goes into the configuration, which is written for it.
        output=Path(output) if output is not None and config is None else None,
        exhaustive=exhaustive,
        driver="fio" if driver == "fio" else "deepspeed",
        device="cuda" if device == "cuda" else "cpu",
        processes=processes,
        io_bytes=parse_io_size(io_size) if io_size is not None else 0,
        python=check_python(python),
        runs_dir=Path(runs_dir) if runs_dir is not None else None,
        allow_busy=allow_busy,
        dry_run=dry_run,
        seed=seed,
        command=sys.argv,
    )
    if store_vars is not None:
        check_store(Path(store_vars))
    if explain is not None:
        check_explain(Path(explain))
    result = run.tune(request, best_view())
    if result.record is not None:
        write_json(result.record, json_to)
        if json_to != "-":
            print_tune(result.record, result.path, request.output, table_console())
        if result.choice is not None and explain is not None:
            click.echo(f"explained: {write_explanation(result.record, Path(explain))}", err=True)
        if result.choice is not None and store_vars is not None and result.code == 0:
            path = store(Path(store_vars), result.record, result.choice.settings.block(), str(request.mix))
            click.echo(f"stored: {path}", err=True)
    if config is not None and result.choice is not None and result.code == 0:
        ds_config.write(config[0], result.choice.settings, dry_run)
    return int(result.code)
