"""One node of a Slurm job: ``python -m tunetool.launch.slurm_node WORK PLACE ADDRESS PORT HOST...``, a task of srun.

WORK is shared by the nodes: its ``spec.json`` says what to run, ranks write there, and ``verdict-<NODE>.json`` is
there in the end. PLACE is this node's own, and gone afterwards.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tunetool.launch import node
from tunetool.launch.spec import SPEC, VERDICT, read_spec, read_verdict, write
from tunetool.node.common.training_part import NoTraining, python_of_ranks

_KEPT = ("SLURM_JOB_ID", "SLURM_CONF", "SLURM_CLUSTER_NAME")


def main(work: str, node_dir: str, address: str, port: str, hosts: Sequence[str]) -> int:
    """Returns exit status 0 if the run succeeded, 1 if its verdict is a failure, 3 if it was cancelled."""
    index = int(os.environ["SLURM_NODEID"])
    try:
        spec = read_spec(Path(work))
    except OSError as error:
        # Slurm started this in a directory of that name, which may be local to this node.
        sys.stderr.write(f"tunetool: `{hosts[index]}` does not see `{work}/{SPEC}`: {error.strerror}\n")
        return 4
    directory = Path(node_dir)
    directory.mkdir(mode=0o700)
    master = (address, int(port)) if len(hosts) > 1 else None
    try:
        # The Python of the call runs this already; a container may have it at another path.
        python, variables = python_of_ranks(sys.executable if spec.python else "", sys.executable)
    except NoTraining as error:
        sys.stderr.write(f"tunetool: `{hosts[index]}`: {error.message}; {error.hint}\n")
        return 4
    node_spec = replace(
        spec,
        directory=node_dir,
        hosts=list(hosts),
        node=index,
        python=python,
        environment={**variables, **spec.environment},
        master=master,
        line_port=int(port) + 1,
    )
    write(node_spec, directory, SPEC)
    # A library that sees srun's variables of a task would assume that srun started the ranks.
    for name in [name for name in os.environ if name.startswith(("SLURM", "PMI", "PMIX")) and name not in _KEPT]:
        del os.environ[name]
    # The guard ends when its standard input closes; Slurm's tasks have none, and get SIGTERM.
    reading, _writing = os.pipe()
    os.dup2(reading, 0)
    os.close(reading)
    try:
        code = node.main(node_dir)
        if code != 0:
            return code
        verdict = read_verdict((directory / VERDICT).read_text())
        write(verdict, Path(work), verdict_name(index))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 0 if verdict.failure is None else 1


def verdict_name(index: int) -> str:
    """Path of the verdict of the node with that index, in WORK."""
    return f"verdict-{index}.json"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:]))
