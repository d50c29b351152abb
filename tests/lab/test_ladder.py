"""Level full on a built node: the slow drive is named by its serial, and raw rungs read the right bytes and write none."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from conftest import BIN, POINT, ROOT, Lab, checksums

pytestmark = pytest.mark.usefixtures("marker")

RAW = """
import dataclasses, json, mmap, os, pathlib, subprocess
from tunetool.measure.fio import find_fio, shares
from tunetool.measure.ladder import calls, source
from tunetool.node.blockstack import difference, read_stack, snapshot

MIB = 2**20
place = pathlib.Path("POINT/raw-test")
place.mkdir()
files = [place / "a", place / "b"]
try:
    # In turns, so that each file has several extents; sizes that end inside a chunk.
    with open(files[0], "wb") as a, open(files[1], "wb") as b:
        for turn in range(6):
            for stream in (a, b):
                stream.write(os.urandom(16 * MIB + 4096 * turn))
                stream.flush()
                os.fsync(stream.fileno())
    stack = read_stack(str(place))
    raw = source.find(stack, files)
    source.prove(raw)
    wrong = dataclasses.replace(raw, stripe=dataclasses.replace(raw.stripe, members=raw.stripe.members[::-1]))
    try:
        source.prove(wrong)
        caught = ""
    except source.NoRawData as error:
        caught = str(error)

    def pieces(extent):
        # From the extent's start, to the end of each chunk, in whole blocks of 4096.
        done = 0
        while done < extent.length:
            inside = (extent.physical + done) % raw.stripe.chunk_bytes
            count = min(extent.length - done, raw.stripe.chunk_bytes - inside)
            yield done, count
            done += count

    def direct(path, offset, count):
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, MIB) as page:
            os.preadv(handle, [memoryview(page)[: -(-count // 4096) * 4096]], offset)
            data = page[:count]
        os.close(handle)
        return data

    compared = equal = 0
    for path, extents in raw.extents.items():
        content = pathlib.Path(path).read_bytes()
        for extent in extents:
            for done, count in pieces(extent):
                slot, offset = raw.stripe.locate(extent.physical + done)
                data = direct("/dev/" + raw.stripe.members[slot], offset, count)
                start = extent.logical + done
                compared += count
                equal += count if data == content[start : start + count] else 0
    os.sync()
    # Frozen, the file system itself writes nothing: what the drives count as written would be ours.
    subprocess.run(["fsfreeze", "--freeze", "POINT"], check=True)
    try:
        before = snapshot(stack)
        fio = find_fio(dict(os.environ))
        groups = list(raw.members.items()) + [("array", raw.array)]
        done = subprocess.run(calls.raw_reads(fio, groups, 0.3), capture_output=True, text=True, check=True, cwd="/")
        change = difference(snapshot(stack), before)
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", "POINT"], check=True)
    claimed = sum(each.claimed_bytes for each in shares(fio, "read", done.stdout, by_name=True).values())
    members = [change[name] for name in raw.members]
    print(json.dumps({
        "caught": caught, "compared": compared, "equal": equal,
        "size": sum(file.stat().st_size for file in files), "extents": sum(map(len, raw.extents.values())),
        "claimed": claimed, "read": sum(each.moved_bytes("read") for each in members),
        "writes": sum(each.write_ios for each in members), "drives": len(members),
    }))
finally:
    for file in files:
        file.unlink(missing_ok=True)
    place.rmdir()
""".replace("POINT", POINT)


def on_the_node(lab: Lab, script: str) -> dict[str, Any]:
    """Run a script with the program's own Python on node1, as root."""
    python = "$(dirname $(readlink -f /opt/tunetool/bin/tunetool))/python"
    done = subprocess.run(
        [str(BIN / "tunetool"), "lab", "ssh", "node1", "--", f"{python} -"],
        input=script,
        cwd=ROOT,
        env=lab.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.slow  # where the bytes lie is in tests/unit/test_extents.py and test_stripe.py, that nothing is written in tests/measurement
def test_every_byte_is_found_on_the_members_without_a_write(built: Lab) -> None:
    answer = on_the_node(built, RAW)
    assert answer["drives"] == 8
    assert answer["extents"] >= 2
    assert answer["compared"] == answer["equal"] == answer["size"]
    assert "is not what" in answer["caught"]
    assert answer["writes"] == 0
    assert 0.98 <= answer["read"] / answer["claimed"] <= 1.02


@pytest.mark.slow
def test_a_throttled_drive_is_named_by_its_serial(built: Lab) -> None:
    before = checksums(built)
    built.lab("fault", "node1", "slow-drive", "--drive", "LAB1NV5")
    done = built.verify("--level", "full", "--expect", "read=1MBps", "--duration", "1s")
    assert done.code == 1, done.text  # drives.balance fails for that drive, as at level quick
    record = built.record()
    loss = record["ladder"]["loss"]
    assert (loss["rung"], loss["cause"]) == ("drives alone, their sum", "slow-drive")
    # The slowest drive is first: an emulator may delay another one for a second.
    assert loss["found"].startswith("drive `LAB1NV5` reads")
    drives = {m["parameters"]["serial"]: m for m in record["measurements"] if m["name"] == "drive.read"}
    assert len(drives) == 8
    for measurement in drives.values():
        assert 0.98 <= measurement["evidence"]["ratio"] <= 1.02
    slow = drives.pop("LAB1NV5")
    # The lab limits its rate; delays of the other drives do not matter in this test.
    assert slow["value"] == min(slow["value"], *(other["value"] for other in drives.values()))
    names = {measurement["name"]: measurement["layer"] for measurement in record["measurements"]}
    for name, layer in (
        ("drives.read.2", "drive"),
        ("drives.read.4", "drive"),
        ("drives.read.8", "drive"),
        ("array.read", "md"),
        ("sequential.read.io_uring", "filesystem"),
        ("sustained.write", "filesystem"),
        ("random.read.4k", "filesystem"),
    ):
        assert names[name] == layer
    skipped = [rung for rung in record["ladder"]["rungs"] if rung.get("skipped")]
    assert {rung["kind"] for rung in skipped} == {"aio", "hbm-bounce", "hbm-direct", "checkpoint"}
    assert checksums(built) == before
    assert built.ssh("node1", f"ls -A {POINT}") == "deepspeed_offload"
