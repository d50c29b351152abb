"""Measure what a fleet costs the control machine, and print the table of docs/concepts/scale.md.

    scale.py nodes 1 2 4             virtual nodes: site.yml on blank ones, then again on built ones
    scale.py plans 16 64             hosts that are this machine: playbooks/plan.yml, which only reads
    scale.py containers 16 64        containers that were built before: what a container can of site.yml, again

Nodes are a lab of their own, gone afterwards; containers are copies of one that was built first. Every figure is the
median of --repeat runs with their range; memory is the peak of ansible-playbook and all its children, sampled: the sum
of their proportional sets (what they really take) and of their resident sets (what `ps` shows; shared pages count
again in each). Nothing is ever changed on this machine itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import container

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
NAME = "tunetool-scale"
CONTAINER_ROLES = ("node_packages", "host_memory", "tunetool")
"""What a container can show; `tunetool` without the manifest, which needs an array."""


@dataclass(frozen=True)
class Measured:
    """One run of Ansible over a number of hosts."""

    seconds: float
    pss: int
    rss: int
    trips: Sequence[int]
    tasks: Sequence[int]


class Memory(threading.Thread):
    """Samples a process and its children until it is stopped."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pss = self.rss = 0
        self._pid = pid
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(0.25):
            sizes = [size for pid in family(self._pid) if (size := sizes_of(pid)) is not None]
            self.rss = max(self.rss, sum(rss for rss, _pss in sizes))
            self.pss = max(self.pss, sum(pss for _rss, pss in sizes))

    def stop(self) -> None:
        self._end.set()
        self.join()


def family(pid: int) -> list[int]:
    """Pids of the process and its descendants, ssh clients included."""
    pids, todo = [], [pid]
    while todo:
        parent = todo.pop()
        pids.append(parent)
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                todo += [int(child) for child in (task / "children").read_text().split()]
    return pids


def sizes_of(pid: int) -> tuple[int, int] | None:
    """Resident and proportional set in bytes."""
    with contextlib.suppress(OSError):
        rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        return int(rows["Rss"].split()[0]) * 1024, int(rows["Pss"].split()[0]) * 1024
    return None


def measure(playbook: str, inventory: Path, forks: int, limit: str, **environment: str) -> Measured:
    """One run; ends this program with Ansible's message if a host failed."""
    with tempfile.TemporaryDirectory() as directory:
        summary, log = Path(directory) / "summary.json", Path(directory) / "log"
        with log.open("w") as output:
            started = time.monotonic()
            process = subprocess.Popen(
                [
                    str(BIN / "ansible-playbook"),
                    playbook,
                    "-i",
                    str(inventory),
                    "--forks",
                    str(forks),
                    "--limit",
                    limit,
                ],
                cwd=ROOT,
                env={**os.environ, "TUNETOOL_SUMMARY_FILE": str(summary), "ANSIBLE_NOCOLOR": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            memory = Memory(process.pid)
            memory.start()
            code = process.wait()
            seconds = time.monotonic() - started
            memory.stop()
        if code:
            raise SystemExit(f"error: `{playbook}` failed\nhint: its last lines were\n{log.read_text()[-3000:]}")
        hosts = json.loads(summary.read_text())["hosts"]
    return Measured(
        seconds, memory.pss, memory.rss, [host["trips"] for host in hosts], [host["tasks"] for host in hosts]
    )


def middle(values: Sequence[float], form: str = "%.0f") -> str:
    """Median, and the range of more than one."""
    shown = form % statistics.median(values)
    return shown if len(values) == 1 else f"{shown} ({form % min(values)} to {form % max(values)})"


def row(what: str, count: int, forks: int, runs: Sequence[Measured]) -> str:
    trips = sorted({trip for run in runs for trip in run.trips})
    tasks = sorted({task for run in runs for task in run.tasks})
    cells = [
        what,
        str(count),
        str(forks),
        str(len(runs)),
        middle([run.seconds for run in runs]),
        middle([run.seconds / count for run in runs], "%.1f"),
        middle([run.pss / 2**20 for run in runs]),
        middle([run.rss / 2**20 for run in runs]),
        "/".join(map(str, tasks)),
        "/".join(map(str, trips)),
    ]
    return "| " + " | ".join(cells) + " |"


def heading() -> None:
    titles = ("run", "hosts", "forks", "runs", "seconds", "s/host", "MiB (PSS)", "MiB (RSS)", "tasks", "trips")
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|", flush=True)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def tool(*arguments: str) -> None:
    done = subprocess.run([str(BIN / "tunetool"), *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def nodes(counts: Sequence[int], forks: int, repeat: int) -> None:
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as directory:
        os.environ["TUNETOOL_LAB_DIR"] = str(Path(directory) / "lab")
        inventory = Path(directory) / "inventory"
        inventory.mkdir()
        (inventory / "group_vars").symlink_to(ROOT / "inventory/lab/group_vars")
        try:
            for count in counts:
                # No more nodes than are measured: an idle one takes its share of an emulating machine.
                tool("lab", "up", "--nodes", str(count))
                names = [f"node{number}" for number in range(1, count + 1)]
                first, again = [], []
                for number in range(repeat):
                    for name in names:
                        tool("lab", "reset", name)
                    tool("lab", "inventory", "--output", str(inventory / "hosts.yml"))
                    first.append(measure("site.yml", inventory, forks, ",".join(names)))
                    again.append(measure("site.yml", inventory, forks, ",".join(names)))
                    say(f"{count} nodes, round {number + 1}: {first[-1].seconds:.0f} s, {again[-1].seconds:.0f} s")
                print(row("blank virtual nodes", count, forks, first), flush=True)
                print(row("built virtual nodes", count, forks, again), flush=True)
        finally:
            tool("lab", "down")


def plans(counts: Sequence[int], forks: int, repeat: int) -> None:
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as directory:
        path = Path(directory) / "hosts.json"
        variables: dict[str, Any] = {
            "ansible_connection": "local",
            "ansible_become": False,
            "ansible_pipelining": True,
            "nvme_drives_count": 8,
        }
        for count in counts:
            # Each has its own name as address, by which round trips are counted.
            hosts: dict[str, Any] = {f"host{number}": {} for number in range(1, count + 1)}
            path.write_text(json.dumps({"all": {"vars": variables, "hosts": hosts}}))
            runs = [measure("playbooks/plan.yml", path, forks, "all") for _ in range(repeat)]
            print(row("plans of this machine", count, forks, runs), flush=True)


def containers(counts: Sequence[int], forks: int, repeat: int) -> None:
    runtime = container.find_runtime(os.environ.get("TUNETOOL_CONTAINER_RUNTIME", ""))
    first, image = f"{NAME}-1", f"localhost/{NAME}:built"
    names: list[str] = []
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as directory, gone(runtime, names):
        playbook = container_playbook(Path(directory))
        plugins = str(ROOT / "molecule/default/connection_plugins")
        names.append(first)
        container.up(runtime, "debian12", first)
        # An image has no package lists.
        checked([runtime, "exec", first, "apt-get", "-qq", "update"])
        inventory = container_inventory(Path(directory), runtime, names)
        measure(playbook, inventory, 1, "all", ANSIBLE_CONNECTION_PLUGINS=plugins)
        say("built one container; starting its copies")
        checked([runtime, "commit", first, image])
        for count in counts:
            while len(names) < count:
                names.append(f"{NAME}-{len(names) + 1}")
                container.start(runtime, image, names[-1])
            time.sleep(10)
            inventory = container_inventory(Path(directory), runtime, names)
            # Once unmeasured: what is new in a copy (its mounts) is set there.
            measure(playbook, inventory, forks, "all", ANSIBLE_CONNECTION_PLUGINS=plugins)
            runs = [
                measure(playbook, inventory, forks, "all", ANSIBLE_CONNECTION_PLUGINS=plugins) for _ in range(repeat)
            ]
            print(row("built containers", count, forks, runs), flush=True)
    container.call([runtime, "rmi", image])


@contextlib.contextmanager
def gone(runtime: str, names: list[str]) -> Iterator[None]:
    """Remove all containers, also after an error."""
    try:
        yield
    finally:
        for name in names:
            container.down(runtime, name)


def checked(argv: Sequence[str]) -> None:
    done = container.call(argv, 300)
    if done.returncode:
        raise SystemExit(f"error: `{' '.join(argv)}` failed\nhint: {container.last_line(done.stderr)}")


def container_playbook(directory: Path) -> str:
    """provision.yml's own plays, with the roles that a container can take."""
    plays = yaml.safe_load((ROOT / "playbooks/provision.yml").read_text())
    plays[-1]["tasks"] = [
        {
            "name": f"Role {role}",
            "ansible.builtin.import_role": {
                "name": f"tunetool.node.{role}",
                **({"tasks_from": "install.yml"} if role == "tunetool" else {}),
            },
        }
        for role in CONTAINER_ROLES
    ]
    del plays[-1]["roles"]
    for play in plays:
        play["become"] = False
    path = directory / "playbook.yml"
    path.write_text(yaml.safe_dump(plays, sort_keys=False))
    return str(path)


def container_inventory(directory: Path, runtime: str, names: Sequence[str]) -> Path:
    variables: dict[str, Any] = yaml.safe_load((ROOT / "molecule/default/vars/container.yml").read_text())
    variables |= {
        "ansible_connection": "container",
        "ansible_container_runtime": runtime,
        "ansible_remote_tmp": "/tmp/ansible",
        "ansible_pipelining": True,
        "nvme_drives_count": 8,
    }
    path = directory / "hosts.json"
    path.write_text(json.dumps({"all": {"vars": variables, "hosts": {name: {} for name in names}}}))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["nodes", "containers", "plans"])
    parser.add_argument("counts", nargs="+", type=int)
    parser.add_argument("--forks", type=int, default=50)
    parser.add_argument("--repeat", type=int, default=1)
    options = parser.parse_args()
    # A time limit from outside must clean up as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    heading()
    {"nodes": nodes, "containers": containers, "plans": plans}[options.what](
        options.counts, options.forks, options.repeat
    )


if __name__ == "__main__":
    main()
