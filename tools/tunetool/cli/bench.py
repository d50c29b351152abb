"""``tunetool bench``: the benchmarks."""

from __future__ import annotations

import click

from tunetool.cli.bench_api import api
from tunetool.cli.bench_checkpoint import checkpoint
from tunetool.cli.bench_dataset import dataset
from tunetool.cli.bench_drives import drives
from tunetool.cli.bench_ds_io import ds_io
from tunetool.cli.bench_experts import experts
from tunetool.cli.bench_finetune import finetune
from tunetool.cli.bench_inference import inference
from tunetool.cli.bench_loading import loading
from tunetool.cli.bench_offload import offload
from tunetool.cli.bench_reference import reference
from tunetool.cli.bench_staging import staging
from tunetool.cli.bench_strategies import strategies
from tunetool.cli.groups import Group


@click.group("bench", cls=Group)
def command() -> None:
    """Run a benchmark. Each one writes a record; most also write a page of plots."""


command.add_command(checkpoint)
command.add_command(loading)
command.add_command(offload)
command.add_command(dataset)
command.add_command(finetune)
command.add_command(staging)
command.add_command(reference)
command.add_command(strategies)
command.add_command(ds_io)
command.add_command(experts)
command.add_command(inference)
command.add_command(api)
command.add_command(drives)
