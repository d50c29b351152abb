"""What runs each command line of README and of the tutorials: a line without a row here fails a test.

``HERE`` are run in their order by tests/measurement/test_documents.py, as the page says, in an environment and a HOME of
their own. The others say what runs them, or why nothing can.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
README, FLEET, NO_HARDWARE, RENTED = (
    ROOT / name
    for name in (
        "README.md",
        "docs/tutorials/first-fleet.md",
        "docs/tutorials/no-hardware.md",
        "docs/tutorials/rented-gpu.md",
    )
)
PAGES = (README, FLEET, NO_HARDWARE, RENTED)
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Here:
    """A line that this machine can run, and how it may end."""

    codes: Sequence[int] = (0,)
    says: str = ""
    """A pattern of what it prints, on either stream."""


JUDGED = (0, 1, 3)
"""The exit codes of a command that judges: whatever this machine is, the call is not wrong."""
_BUSY = "error: busy: "
"""Other work on the disk under this test; a call that was wrong ends with 2."""
_RECORD = f"record: |{_BUSY}"
TORCH_OR_3 = "torch"
"""In place of a pattern: 0 where torch and DeepSpeed are installed, else what is missing and a hint."""

HERE: Mapping[str, Here] = {
    "python3 -m venv ~/tunetool && . ~/tunetool/bin/activate": Here(),
    "pip install './tunetool-0.1.0-py3-none-any.whl[control]'": Here(),
    "pip install ./tunetool-0.1.0-py3-none-any.whl": Here(),
    "tunetool doctor provision": Here((0, 1), "provision"),
    "tunetool doctor lab": Here((0, 1), "lab"),
    "tunetool inspect": Here((0,), "drives"),
    "tunetool init inventory/mycluster": Here((0,), "inventory/mycluster"),
    "tunetool init inventory/lab --profile lab": Here((0,), "inventory/lab"),
    "tunetool verify --target /mnt/data --expect read=5GBps,write=2GBps": Here(JUDGED, _RECORD),
    "tunetool verify --target /mnt/scratch": Here((1, 3), f"no expectation to compare with|{_BUSY}"),
    "tunetool verify --target /mnt/scratch --expect read=1GBps,write=1GBps": Here(JUDGED, _RECORD),
    "tunetool verify --target /mnt/data --level full": Here(JUDGED, f"The ladder|{_BUSY}"),
    "tunetool verify --target /mnt/scratch --level full": Here(JUDGED, f"The ladder|{_BUSY}"),
    "tunetool build-ops --python /opt/venv/bin/python": Here((0, 3), TORCH_OR_3),
    "tunetool tune --target /mnt/scratch --python /opt/venv/bin/python -o aio.json": Here((0, 3), TORCH_OR_3),
    "tunetool ds-config zero3-nvme --model phi3-mini --target /mnt/scratch --aio aio.json --world-size 1 "
    "--python /opt/venv/bin/python -o ds_config.json": Here((0, 3), TORCH_OR_3),
    "tunetool stage /mnt/scratch/models/qwen /dev/shm/qwen": Here((0,), "record: "),
    "tunetool bench loading --model /dev/shm/qwen": Here((0, 3), TORCH_OR_3),
    "tunetool bench checkpoint --target /mnt/scratch --model phi3-mini --state-bytes 4GB": Here((0, 2, 3), TORCH_OR_3),
    "tunetool report list": Here((0,), "verify"),
}
_NEWCOMER = "tools/dev/newcomer.py runs it on a virtual node (tests/unit/test_newcomer.py holds that)"
_FOUR = "tools/dev/newcomer.py --four runs it on four virtual nodes"
_LAB = "tests/lab runs the same call on a virtual node"
_FLEET = "it needs nodes of the reader's; tests/lab runs the same call over virtual nodes"
ELSEWHERE: Mapping[str, str] = {
    "make rehearse": "it takes a virtual node of its own; its steps are those of tools/dev/newcomer.py",
    "make test": "it is what runs this test",
    "make check": "`make fresh` runs it in a container that has nothing (tools/dev/fresh.py)",
    "sudo apt-get install -y fio python3-venv g++ libaio-dev python3-dev": "a test installs nothing on this machine; "
    "test_documents.py holds that its packages are those of tests/programs.txt",
    "tunetool accept rented --set target=/mnt/data": "it takes minutes; tests/measurement/test_accept_on_a_disk.py runs another "
    "goals file",
    "tunetool lab up": _NEWCOMER,
    "tunetool provision -i inventory/lab": _NEWCOMER,
    "tunetool verify -i inventory/lab --expect 50MBps --duration 2s": _NEWCOMER,
    "tunetool lab up --nodes 4": _FOUR,
    "tunetool lab fault node3 slow-drive --drive LAB3NV2": _FOUR,
    "tunetool verify -i inventory/lab --expect 50MBps --duration 2s --one-at-a-time": _FOUR,
    "tunetool report page /var/lib/tunetool/runs/20261123T143719Z-fleet-vm/hosts/node1.json": "newcomer.py makes the "
    "page of its own node, whose run has another name",
    "tunetool lab fault node1 slow-drive --drive LAB1NV5": _LAB,
    "tunetool lab reboot node1": _LAB,
    "tunetool lab reset node1": _LAB,
    "tunetool lab down": _NEWCOMER,
    "tunetool provision -i inventory/mycluster": _FLEET,
    "tunetool verify -i inventory/mycluster --expect 50GBps": _FLEET,
    "tunetool provision -i inventory/mycluster --check": _FLEET,
    "tunetool provision -i inventory/mycluster --hosts-per-batch 1,10,25%": _FLEET,
    "tunetool verify -i inventory/mycluster --expect read=50GBps,write=25GBps": _FLEET,
    "tunetool verify -i inventory/mycluster --limit node007 --level full": _FLEET,
}


def lines_of(page: Path) -> list[str]:
    """Every command line of a page in its order, without its comment; continued lines are one."""
    lines = []
    for block in _BLOCK.finditer(page.read_text()):
        joined = re.sub(r" *\\\n\s*", " ", block[1])
        lines += [line[2:].partition(" #")[0].rstrip() for line in joined.splitlines() if line.startswith("$ ")]
    return lines
