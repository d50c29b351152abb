"""A file system that mkfs did not finish is distinguished from one that somebody may have used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunetool.node.volume.make_xfs import half_made

# The start of the superblock as mkfs.xfs 6.1.0 left it, killed half-way. Byte 126 is its mark.
KILLED = bytes.fromhex(
    "5846534200001000000000000080000000000000000000000000000000000000"
    "800049a5f227402fabd0952c149521fc0000000000400040ffffffffffffffff"
    "ffffffffffffffffffffffffffffffff000000010007ff000000001100000000"
    "00004000b5a50200020000086e766d655f726169643000000c09090313000119"
).ljust(512, b"\0")
FINISHED = KILLED[:126] + b"\0" + KILLED[127:]


@pytest.mark.parametrize(
    ("content", "label", "expected"),
    [
        (KILLED, "nvme_raid0", True),
        (FINISHED, "nvme_raid0", False),
        (KILLED, "data", False),
        (KILLED, "nvme_raid", False),
        (bytes(512), "nvme_raid0", False),
        (bytes(512), "", False),
        (KILLED[:127], "nvme_raid0", False),
        (b"", "", False),
        (b"xfsb" + KILLED[4:], "nvme_raid0", False),
    ],
)
def test_only_our_own_unfinished_file_system_is_given_up(content: bytes, label: str, expected: bool, tmp_path: Path):
    device = tmp_path / "md127"
    device.write_bytes(content)
    assert half_made(str(device), label) is expected
