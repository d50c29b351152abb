"""``tunetool bench ds-io``: DeepSpeed's own I/O handle over one file, with proof."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command("ds-io")
@click.option("--folder", required=True, metavar="DIR", help="Where the file goes; it is removed afterwards.")
@click.option("--io_size", required=True, metavar="SIZE", help="Bytes to move: `1G` and `1GiB` are 2^30.")
@click.option("--block_size", default="1M", show_default=True, metavar="SIZE", help="Of one request.")
@click.option("--queue_depth", type=int, default=32, show_default=True, help="Requests in flight, per thread.")
@click.option("--io_parallel", type=int, default=1, show_default=True, help="Threads of one operation.")
@click.option("--single_submit", is_flag=True, help="Submit requests one by one.")
@click.option("--sequential_requests", is_flag=True, help="Do not overlap submission with completion.")
@click.option("--read", is_flag=True, help="Read instead of write.")
@click.option("--gpu", is_flag=True, help="From or to GPU memory, by a bounce buffer.")
@click.option("--use_gds", is_flag=True, help="With --gpu: by GPUDirect Storage.")
@click.option("--use_accelerator_pin_memory", is_flag=True, help="With --gpu: a bounce buffer pinned by CUDA.")
@click.option("--loops", type=int, default=3, show_default=True, help="Operations that count.")
@click.option("--warmup_loops", type=click.IntRange(min=0), default=1, show_default=True, help="Operations before.")
@click.option("--python", metavar="PATH", help="Whose torch and DeepSpeed. Default: tunetool's.")
@click.option("--json", "json_to", metavar="FILE|-", help="Also write the record to FILE; `-`: it alone on stdout.")
@click.option("--runs-dir", metavar="DIR", help="Where records are kept.")
@click.option("--allow-busy", is_flag=True, help="Measure beside a job that uses the drives or GPUs.")
@click.option("--dry-run", is_flag=True, help="Say what would be written; do nothing.")
def ds_io(
    folder: str,
    io_size: str,
    block_size: str,
    queue_depth: int,
    io_parallel: int,
    single_submit: bool,
    sequential_requests: bool,
    read: bool,
    gpu: bool,
    use_gds: bool,
    use_accelerator_pin_memory: bool,
    loops: int,
    warmup_loops: int,
    python: str | None,
    json_to: str | None,
    runs_dir: str | None,
    allow_busy: bool,
    dry_run: bool,
) -> int:
    """DeepSpeed's own I/O handle over one file: `ds_io` with proof.

    Options are spelt as ds_io spells them. What the handle claims is held against the drives' counters, and the file
    is read back by another process. Exit codes: 0 moved exactly and proven, 2 the call was wrong (a size that cannot be
    moved exactly), 3 it could not be measured or proven.
    """
    from tunetool.bench import ds_io as bench
    from tunetool.cli.verify import check_json, check_python, no_empty_paths, write_json
    from tunetool.report.ds_io import print_ds_io
    from tunetool.report.progress import best_progress
    from tunetool.report.table import table_console

    no_empty_paths({"--folder": folder, "--json": json_to, "--runs-dir": runs_dir, "--python": python})
    check_json(json_to)
    request = bench.Request(
        folder=Path(folder),
        io_size=bench.parse_io_size(io_size),
        block_size=bench.parse_io_size(block_size),
        queue_depth=queue_depth,
        io_parallel=io_parallel,
        single_submit=single_submit,
        sequential_requests=sequential_requests,
        read=read,
        gpu=gpu,
        use_gds=use_gds,
        use_accelerator_pin_memory=use_accelerator_pin_memory,
        loops=loops,
        warmup_loops=warmup_loops,
        python=check_python(python),
        runs_dir=Path(runs_dir) if runs_dir is not None else None,
        allow_busy=allow_busy,
        dry_run=dry_run,
        command=sys.argv,
    )
    result = bench.ds_io(request, best_progress())
    if result.record is not None:
        write_json(result.record, json_to)
        if json_to != "-":
            print_ds_io(result.record, result.path, table_console())
    return int(result.code)
