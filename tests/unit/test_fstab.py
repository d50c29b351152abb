"""Files of others that tunetool edits: they are read as their programs read them, and all other bytes are kept."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tunetool.node.audit.before_changes import in_the_way
from tunetool.node.common.files import content, lines, printable, replace_file, with_line
from tunetool.node.machine.fstab import FstabConflict, entries_at, foreign_entry, parse_fstab, with_entry, without_entry
from tunetool.node.machine.mounts import mount_at, parse_mountinfo, plain_path

POINT = "/mnt/nvme_raid0"
FEW = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

# --- the same entries as libmount ---

WORDS = st.sampled_from(
    [
        "/dev/sdb1",
        "UUID=1-2",
        "none",
        POINT,
        POINT + "/",
        "//mnt/./x",
        "/a\\040b",
        "/\\303\\274",
        "/x\\0401\\134\\",
        "/\xfc",
        "/a\vb",
        "/c\fd",
        "/e\x85f\u2028g",
        "ext4",
        "ro,nofail",
        "#no",
        "0",
        "1",
        "-1",
        "0x1",
        "\x0b2",
        "3\r",
        "\\09",
    ]
)
BLANKS = st.text(" \t", min_size=1, max_size=2)


@st.composite
def fstab_lines(draw: st.DrawFn) -> str:
    words = draw(st.lists(WORDS, max_size=7))
    line = draw(st.sampled_from(["", "", " ", "\t", "# ", "\f"]))
    for word in words:
        line += word + draw(BLANKS)
    return line.rstrip(" \t") if draw(st.booleans()) else line


FILES = st.builds(
    lambda parts, last: "".join(line + end for line, end in parts) + last,
    st.lists(st.tuples(fstab_lines(), st.sampled_from(["\n", "\n", "\r\n", "\n\n"])), max_size=20),
    st.one_of(st.just(""), fstab_lines()),
)


def as_findmnt_reads(path: Path) -> list[tuple[str, str, str, str]]:
    """Source, target, type and options of each entry that libmount takes. findmnt shows odd bytes as ``\\xfc``."""
    argv = ["findmnt", "--fstab", "--tab-file", str(path), "-P", "-o", "SOURCE,TARGET,FSTYPE,OPTIONS"]
    done = subprocess.run(argv, capture_output=True, check=False)
    rows = []
    for line in done.stdout.split(b"\n"):
        values = re.findall(rb'[A-Z]+="([^"]*)"', line)
        if values:
            rows.append(tuple(_unhexed(value).decode("utf-8", "surrogateescape") for value in values))
    return rows  # type: ignore[return-value]  # four columns were asked for


def _unhexed(text: bytes) -> bytes:
    return re.sub(rb"\\x([0-9a-f]{2})", lambda match: bytes([int(match.group(1), 16)]), text)


@FEW
@given(text=FILES)
@example(text="LABEL=other /mnt/nvme_raid0/ ext4 nofail 0 0\nLABEL=o //mnt/x ext4\n/dev/c /d\n")
@example(text="/dev/c /m ext4\r\n/dev/d /n ext4 ro x\n/dev/e /o ext4 ro 0 0 # why\n")
@example(text="/dev/\\303\\274 /\\303\\274\\012x ext4 a\\040b\n/dev/a\fb\u2028c /m\v\x85 ext4\n")
@example(text="/dev/a /x\\000y ext4 a\n/dev/a /x\\400y ext4 ro\n/dev/\0b /m ext4 ro\n")
def test_an_fstab_is_read_as_libmount_reads_it(text: str, tmp_path: Path) -> None:
    path = tmp_path / "fstab"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    mine = [
        (entry.spec, entry.mount_point, entry.fs_type, ",".join(entry.options))
        for entry in parse_fstab(content(str(path)))
        if not entry.skipped
    ]
    assert mine == as_findmnt_reads(path)


@pytest.mark.parametrize(
    "line",
    [
        "LABEL=other /mnt/nvme_raid0/ ext4 nofail 0 0",
        "LABEL=other //mnt/nvme_raid0 ext4 nofail 0 0",
        "LABEL=other /mnt//nvme_raid0/. ext4",
        "LABEL=other\t/mnt/x/../nvme_raid0 ext4",
        "LABEL=other /mnt/nvme\\137raid0 ext4 nofail",
        # mount(8) passes over these two; systemd before 254 did not.
        "LABEL=other /mnt/nvme_raid0",
        "LABEL=other /mnt/nvme_raid0 ext4 nofail yes no",
    ],
)
def test_a_line_for_the_mount_point_is_seen_in_any_spelling(line: str, tmp_path: Path) -> None:
    text = f"UUID=1 / ext4 defaults 0 1\n{line}\n"
    said = f"/etc/fstab line 2 mounts `LABEL=other` at `{POINT}`"
    assert foreign_entry(text, POINT, ["UUID=2"]) == said
    assert foreign_entry(text, "/mnt//nvme_raid0/", ["UUID=2"]) is not None
    with pytest.raises(FstabConflict, match="line 2 mounts `LABEL=other`"):
        with_entry(text, "UUID=2", POINT, "xfs", "nofail")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/fstab").write_text(text)
    assert in_the_way(POINT, str(tmp_path)) == said


def test_an_entry_of_ours_is_known_however_it_is_written() -> None:
    text = 'UUID="2" /mnt/nvme_raid0/ xfs nofail 0 0\n'
    assert foreign_entry(text, POINT, ["UUID=2"]) is None
    assert with_entry(text, "UUID=2", POINT, "xfs", "nofail") == text
    assert with_entry(text, "UUID=2", POINT, "xfs", "ro") == f"UUID=2 {POINT} xfs ro 0 0\n"
    short = "tmpfs //dev/shm tmpfs\n"
    after = with_entry(short, "tmpfs", "/dev/shm", "tmpfs", "size=1", replace_any_spec=True)
    assert after == "tmpfs /dev/shm tmpfs size=1 0 0\n"


@pytest.mark.parametrize("path", ["//usr", "/usr/", "///usr//.", "/usr/x/.."])
def test_one_place_has_one_path(path: str) -> None:
    assert plain_path(path) == "/usr"
    assert mount_at(path, parse_mountinfo("1 0 8:1 / /usr rw - ext4 /dev/sda rw\n")) is not None


# --- mountinfo, whose names hold any byte but blank, tab, line feed and backslash ---


@pytest.mark.parametrize("name", ["a\vb", "a\fb", "a\u2028b", "a\x85b", "a\xa0b", "a\x1cb", "a\rb", "a\udcfcb"])
def test_a_mount_is_found_whatever_its_name_holds(name: str, tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    text = f"30 1 0:40 / /mnt/{name} rw shared:3 - fuse  rw,x\n31 1 8:2 / /srv rw - ext4 /dev/sdb rw\n"
    (tmp_path / "proc/self/mountinfo").write_bytes(text.encode("utf-8", "surrogateescape"))
    mounts = parse_mountinfo(content(str(tmp_path / "proc/self/mountinfo")))
    assert [mount.mount_point for mount in mounts] == ["/mnt/" + name, "/srv"]
    assert (mounts[0].fs_type, mounts[0].source, mounts[0].options) == ("fuse", "", ("rw", "x"))


# --- every byte that is not ours stays ---

BYTES = st.binary(max_size=60)
ODD = st.lists(
    st.one_of(
        fstab_lines().map(lambda line: line.encode("utf-8", "surrogateescape")),
        st.sampled_from(
            [b"# \xfc", b"# a\fb\vc", b"# \xe2\x80\xa8x\xc2\x85", b"# end\r", b"\r", b"\0", b"\x1c\x1d\x1e"]
        ),
        BYTES,
    ),
    max_size=6,
).map(b"\n".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(before=ODD, end=st.sampled_from([b"", b"\n", b"\r\n"]))
@example(before=b"# fr\xfc\n#\f\v\xe2\x80\xa8\xc2\x85\r\nUUID=1 / ext4 defaults 0 1", end=b"")
def test_an_fstab_edited_and_put_back_is_the_same_to_the_byte(before: bytes, end: bytes, tmp_path: Path) -> None:
    path = tmp_path / "fstab"
    path.write_bytes(before + end)
    text = content(str(path))
    if entries_at(text, POINT) or "UUID=u-2" in text:
        return
    for options in ("nofail", "nofail,noatime"):
        replace_file(str(path), with_entry(content(str(path)), "UUID=u-2", POINT, "xfs", options))
        kept = path.read_bytes().replace(b"UUID=u-2 %s xfs %s 0 0\n" % (POINT.encode(), options.encode()), b"", 1)
        assert kept == before + end
        (ours,) = entries_at(content(str(path)), POINT)
        assert (ours.spec, ours.options) == ("UUID=u-2", tuple(options.split(",")))
    replace_file(str(path), without_entry(content(str(path)), "u-2"))
    assert path.read_bytes() == before + end


def test_a_changed_line_keeps_its_end() -> None:
    assert with_entry("UUID=2 /m xfs a 0 0\r\n#\r\n", "UUID=2", "/m", "xfs", "b") == "UUID=2 /m xfs b 0 0\r\n#\r\n"
    assert with_entry("#\nUUID=2 /m xfs a", "UUID=2", "/m", "xfs", "b") == "#\nUUID=2 /m xfs b 0 0"


@given(BYTES.map(lambda raw: raw.decode("utf-8", "surrogateescape")))
def test_lines_are_the_text(text: str) -> None:
    assert "".join(lines(text)) == text
    assert len(lines(text)) == text.count("\n") + (text[-1:] not in ("", "\n"))
    assert "".join(lines(with_line(text, "ours"))).replace("ours\n", "", 1) == text


@given(st.binary(max_size=40), st.text(max_size=5))
def test_what_is_printed_is_utf8_and_names_each_odd_byte(raw: bytes, key: str) -> None:
    shown = printable({key: [raw.decode("utf-8", "surrogateescape"), 1, None, ("\ud800", True)]})
    json.dumps(shown, ensure_ascii=False).encode("utf-8")
    assert shown[key][1:] == [1, None, ["\\ud800", True]]
    assert printable("fr\udcfc") == "fr\\xfc"
    assert shown[key][0].count("\\x") >= raw.decode("utf-8", "surrogateescape").count("\udcfc")
