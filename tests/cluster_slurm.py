"""A real Slurm on the cluster of tests: slurmctld on its control node, slurmd on the others, munge on all."""

from __future__ import annotations

import base64
import secrets
import time

from cluster import CONTROL, NODES, Cluster
from waiting import PATIENCE

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "sacct")
"""The commands that a login node has on PATH."""
_CONFIG = """
ClusterName=tests
SlurmctldHost=control({control})
SlurmUser=root
SlurmdUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
AuthType=auth/munge
# A node here owns no cgroups of its own.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdTimeout=6
KillWait=5
SlurmdParameters=config_overrides
NodeName={nodes} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def start_slurm(cluster: Cluster) -> None:
    """Start Slurm, and wait until every node is idle."""
    key = base64.b64encode(secrets.token_bytes(96)).decode()
    config = _CONFIG.format(control=cluster.address(CONTROL), nodes=",".join(NODES))
    for name in (CONTROL, *NODES):
        daemon = "slurmctld" if name == CONTROL else "slurmd"
        cluster.run(
            name,
            [
                "sh",
                "-ec",
                "mkdir -p /etc/slurm /etc/munge /run/munge /var/log/munge /var/lib/munge /var/spool/slurmctld /var/spool/slurmd;"
                f"chmod 755 /run/munge; umask 077; echo {key} > /etc/munge/munge.key; cat > /etc/slurm/slurm.conf;"
                f"munged --force 2>&1; {daemon}",
            ],
            stdin=config,
        )
    deadline = time.monotonic() + PATIENCE
    while (states := cluster.run(CONTROL, ["sinfo", "-h", "-N", "-o", "%T"], check=False).stdout.split()) != [
        "idle"
    ] * len(NODES):
        if time.monotonic() > deadline:
            logs = cluster.run(CONTROL, ["tail", "-30", "/var/log/slurmctld.log"], check=False).stdout
            raise AssertionError(f"the nodes are {states} after {PATIENCE:g} s\n{logs}")
        time.sleep(0.1)
