"""A process that is killed while it replaces a file or writes a record: the next one removes what it left, and no more."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from builders import record
from tunetool import record as records
from tunetool.node.common.files import replace_file
from tunetool.record import newest_beside
from tunetool.report.runs import list_runs
from waiting import PATIENCE

PROGRAM = """
import json, os, signal, sys
from datetime import datetime, timezone
from pathlib import Path
from tunetool import record as records
from tunetool.node.common.files import replace_file

what, base = sys.argv[1], Path(sys.argv[2])
now = datetime(2026, 1, 2, tzinfo=timezone.utc)
node = records.Node(host="n1", kernel="6.8", cpu_count=2, memory_bytes=2**34)
record = records.Record(kind="verify", id="ab" * 16, started=now, finished=now, node=node, command=["tunetool"])


def write(folder, text):
    if what == "file":
        replace_file(str(folder / "fstab"), text)
    else:
        records.write(record, folder, {"raw/fio.json": text})


def cut(folder, number, at):
    "A writer that gets the signal before its step ``at``: its number, or the name of Python's event."
    pid = os.fork()
    if not pid:
        steps = []

        def look(event, _):
            steps.append(event)
            if at in (len(steps) - 1, event) and "sent" not in steps:
                steps.append("sent")
                os.kill(os.getpid(), number)

        sys.addaudithook(look)
        write(folder, "of the first\\n")
        os._exit(0)
    return pid


def shown(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


answer = []
for at in range(1000):
    folder = base / str(at)
    folder.mkdir()
    (folder / "fstab").write_text("as it was\\n")
    pid = cut(folder, signal.SIGKILL, at)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    left, text = shown(folder), (folder / "fstab").read_text()
    write(folder, "of the second\\n")
    answer.append([status, left, text, shown(folder), (folder / "fstab").read_text()])
    if status == 0:
        break

# One that lives keeps what it works with.
folder = base / "stopped"
folder.mkdir()
pid = cut(folder, signal.SIGSTOP, "os.rename")
assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
write(folder, "of the second\\n")
os.kill(pid, signal.SIGCONT)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps({"cuts": answer, "stopped": [status, shown(folder)]}))
"""


def cut_everywhere(what: str, folder: Path) -> Any:
    run = [sys.executable, "-c", PROGRAM, what, str(folder)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_replaced_file_is_whole_and_alone_the_next_time(tmp_path: Path) -> None:
    said = cut_everywhere("file", tmp_path)
    assert len(said["cuts"]) > 8
    for status, left, text, after, last in said["cuts"]:
        assert status in (-9, 0)
        assert text in ("as it was\n", "of the first\n")
        assert len(left) <= 2
        assert (after, last) == (["fstab"], "of the second\n")
    assert any(len(left) == 2 for _, left, *_ in said["cuts"]), "no cut was between the first byte and the rename"
    assert said["stopped"] == [0, ["fstab"]]
    assert (tmp_path / "stopped/fstab").read_text() == "of the first\n"


def test_an_unfinished_records_directory_goes_with_the_next(tmp_path: Path) -> None:
    said = cut_everywhere("record", tmp_path)
    assert len(said["cuts"]) > 8
    for _, left, _, after, _ in said["cuts"]:
        # Whole or not at all, and nothing else.
        whole = [name for name in left if name.endswith("/record.json") and not name.startswith(".")]
        names = {f"20260102T000000Z-verify-n1{more}" for more in ("", "-2")[: len(whole) + 1]}
        assert after == sorted(
            ["fstab", *(f"{name}/{file}" for name in names for file in ("raw/fio.json", "record.json"))]
        )
    assert any(name.startswith(".tunetool-record-") for _, left, *_ in said["cuts"] for name in left)
    status, after = said["stopped"]
    assert status == 0
    assert sorted(Path(name).name for name in after) == ["fio.json", "fio.json", "record.json", "record.json"]


def test_nobody_elses_file_is_taken_for_a_leftover(tmp_path: Path) -> None:
    ours = tmp_path / ".fstab.tunetool-abcdefgh"
    ours.write_text("a leftover")
    others = [".fstab.abcdefgh", ".fstab.tunetool-abc", ".fstab.tunetool-abcdefgh.bak", ".other.tunetool-abcdefgh"]
    for name in others:
        (tmp_path / name).write_text("theirs")
    (tmp_path / "kept").write_text("kept")
    (tmp_path / ".fstab.tunetool-abcdefg1").symlink_to("kept")
    os.mkfifo(tmp_path / ".fstab.tunetool-abcdefg2")
    expected = {*others, "kept", "fstab", ".fstab.tunetool-abcdefg1", ".fstab.tunetool-abcdefg2"}
    if os.geteuid() == 0:
        foreign = tmp_path / ".fstab.tunetool-abcdefg3"
        foreign.write_text("of another user")
        os.chown(foreign, 65534, 65534)
        expected.add(foreign.name)
    replace_file(str(tmp_path / "fstab"), "new\n")
    assert {path.name for path in tmp_path.iterdir()} == expected
    assert (tmp_path / "kept").read_text() == "kept"


def test_a_file_system_without_locks_keeps_every_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / ".fstab.tunetool-abcdefgh").write_text("perhaps of a process that lives")
    replace_file(str(tmp_path / "fstab"), "new\n")
    assert (tmp_path / "fstab").read_text() == "new\n"
    assert {path.name for path in tmp_path.iterdir()} == {"fstab", ".fstab.tunetool-abcdefgh"}


def test_a_directory_that_another_host_may_be_writing_stays(tmp_path: Path) -> None:
    # Hosts share a runs directory, and over NFS and Lustre none sees another one's lock of a directory.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    ours = f".tunetool-record-{socket.gethostname()}-{boot}-"
    others = [
        ".tmp-abcdefgh",
        f".tunetool-record-another-{boot}-abcdefgh",
        f".tunetool-record-{socket.gethostname()}-00000000-abcdefgh",
        f"{ours}abcdefgh-1",
    ]
    for name in (*others, ours + "abcdefgh"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text("half of a rec")
    (tmp_path / f"{ours}abcdefg1").write_text("a file, which no record is")
    written = records.write(record(), tmp_path)
    kept = {*others, f"{ours}abcdefg1", written.parent.name}
    assert {path.name for path in tmp_path.iterdir()} == kept


@pytest.mark.parametrize("host", ["node1", "a-verify-1"])
def test_a_record_that_is_being_written_is_not_listed(tmp_path: Path, host: str) -> None:
    written = records.write(record(kind="verify"), tmp_path)
    unfinished = tmp_path / f".tunetool-record-{host}-01234567-abcdefgh"
    unfinished.mkdir()
    (unfinished / "record.json").write_bytes(written.read_bytes())
    assert [kept.name for kept in list_runs(tmp_path)] == [written.parent.name]
    assert [name for name, _ in newest_beside(tmp_path, "verify", 9)] == [written.parent.name]
