"""The next boot's knowledge of the array: judged by the mdadm.conf in each image, not by times of files."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from initramfs_images import MICROCODE, archive, entry, image, packed
from programs import need_program
from tunetool.node.array import boot_entries, initramfs_check, initramfs_reader
from tunetool.node.array.initramfs_check import Renewal, check_images, judge_images, renew
from tunetool.node.array.initramfs_reader import Carried, Damaged, Unreadable, read_carried
from tunetool.node.array.mdadm_conf import array_lines, conf_with_array, conf_without_array, line_for
from tunetool.node.common.check_result import FAIL, PASS, SKIP, UNKNOWN
from tunetool.node.common.files import content, replace_file

UUID, OLD = "8c2b1c7e:0a1d5c55:9a3f4d6b:11223344", "00000000:11111111:22222222:33333333"
NAME = "nvme_raid0"
HEAD = "# mdadm.conf\nHOMEHOST <system>\nMAILADDR root\n"
CONF = HEAD + line_for(NAME, UUID) + "\n"
PATH = "/etc/mdadm/mdadm.conf"
NAMES = ("etc/mdadm/mdadm.conf", "etc/mdadm.conf")
ARRAY = {"name": NAME, "uuid": UUID}
KERNEL = "6.1.0-31-cloud-amd64"
FORMS = ["none", "gzip", "bzip2", "xz", "lzma", "zstd", "lz4", "lzop"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A Debian node whose only image has an earlier list of arrays."""
    (tmp_path / "boot").mkdir()
    (tmp_path / "lib/modules" / KERNEL).mkdir(parents=True)
    (tmp_path / "etc/mdadm").mkdir(parents=True)
    (tmp_path / "etc/os-release").write_text("ID=debian\n")
    (tmp_path / PATH[1:]).write_text(CONF)
    put(tmp_path, image(HEAD + line_for(NAME, OLD) + "\n"))
    return tmp_path


def put(root: Path, data: bytes) -> Path:
    path = root / f"boot/initrd.img-{KERNEL}"
    path.write_bytes(data)
    return path


def problems(root: Path, **how: object) -> list[str]:
    return [judgement.problem for judgement in judge_images(PATH, str(root), **how)]  # type: ignore[arg-type]  # as they are named


@pytest.mark.parametrize("year", [1970, 2060])
def test_times_decide_nothing(root: Path, year: int) -> None:
    conf, img = root / PATH[1:], next((root / "boot").iterdir())
    then = time.mktime((year, 1, 2, 0, 0, 0, 0, 0, 0))
    os.utime(conf, (then, then))
    assert problems(root) == [f"it lacks `{line_for(NAME, UUID)}`"]
    assert check_images(ARRAY, str(root)).status == FAIL
    put(root, image(CONF))
    os.utime(img, (0, 0))
    os.utime(conf, (then, then))
    assert problems(root) == [""]
    assert check_images(ARRAY, str(root)).status == PASS


def test_a_run_cut_between_the_two_writes_is_found_by_the_next(root: Path) -> None:
    (root / PATH[1:]).write_text(HEAD)
    put(root, image(HEAD))
    before = content(str(root / PATH[1:]))
    after = conf_with_array(before, NAME, UUID)
    assert problems(root, changed=after != before) == [f"built before `{PATH}` was changed"]
    replace_file(str(root / PATH[1:]), after)
    # The run is interrupted here. The next one has nothing to change in mdadm.conf.
    assert conf_with_array(content(str(root / PATH[1:])), NAME, UUID) == after
    assert problems(root) == [f"it lacks `{line_for(NAME, UUID)}`"]


def test_an_image_that_still_knows_a_removed_array_is_rebuilt(root: Path) -> None:
    put(root, image(CONF))
    (root / PATH[1:]).write_text(conf_without_array(CONF, UUID))
    assert problems(root, gone=[UUID]) == [f"it still has `{line_for(NAME, UUID)}`"]
    # Without an ARRAY line in the file, initramfs-tools adds the arrays on the drives.
    put(root, image(HEAD + line_for("theirs", OLD) + "\n"))
    assert problems(root, gone=[UUID]) == [""]


@pytest.mark.parametrize(
    ("there", "problem"),
    [
        (HEAD, "it lacks"),
        (HEAD + f"ARRAY /dev/md127 UUID={UUID}\n", "it lacks"),
        (CONF + f"ARRAY /dev/md/other metadata=1.2 UUID={UUID}\n", "it still has `ARRAY /dev/md/other"),
        (CONF + line_for(NAME, OLD) + "\n", "it still has"),
        (HEAD + f"#ARRAY\narray  /dev/md/{NAME}\n\tmetadata=1.2\n# why\n  UUID={UUID}\r\n", ""),
        (CONF.replace("HOMEHOST <system>", "#CREATE x"), ""),
        (CONF + line_for("theirs", OLD) + "\n", ""),
    ],
)
def test_what_the_image_says_decides(root: Path, there: str, problem: str) -> None:
    put(root, image(there))
    (said,) = problems(root)
    assert said.startswith(problem)
    assert bool(said) == bool(problem)


def test_verify_asks_about_our_array_alone(root: Path) -> None:
    put(root, image(CONF))
    (root / PATH[1:]).write_text(CONF + line_for("theirs", OLD) + "\n")
    assert problems(root) == [f"it lacks `{line_for('theirs', OLD)}`"]
    assert check_images(ARRAY, str(root)).status == PASS
    put(root, image(CONF + f"ARRAY /dev/md127 UUID={UUID}\n"))
    assert check_images(ARRAY, str(root)).status == FAIL


def test_an_image_without_mdadm_assembles_nothing(root: Path) -> None:
    put(root, image(None, program=False))
    assert problems(root) == [""]
    put(root, image(None))
    assert problems(root) == ["it has mdadm and no mdadm.conf"]
    (root / PATH[1:]).write_text(HEAD)
    assert problems(root) == [""]


@pytest.mark.parametrize("early", [b"", MICROCODE, MICROCODE + b"\0" * 4096 + archive({"kernel/x": b"abc"})])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read(form: str, early: bytes, tmp_path: Path) -> None:
    if form in ("zstd", "lz4", "lzop"):
        need_program(form)
    path = tmp_path / "image"
    path.write_bytes(image(CONF, form, early))
    assert read_carried(str(path), NAMES) == Carried(CONF.encode(), mdadm=False)
    path.write_bytes(image(None, form, early))
    assert read_carried(str(path), NAMES) == Carried(None, mdadm=True)
    path.write_bytes(image(None, form, early, program=False))
    assert read_carried(str(path), NAMES) == Carried(None, mdadm=False)


def test_a_file_of_several_names_has_its_bytes_with_the_last(tmp_path: Path) -> None:
    members = entry("a/mdadm.conf", b"", 7, links=2) + entry("etc/mdadm.conf", b"", 7, links=2)
    members += entry("usr/x", b"other", 8) + entry("var/mdadm.conf", CONF.encode(), 7, links=2)
    (tmp_path / "image").write_bytes(members + entry("TRAILER!!!", b""))
    assert read_carried(str(tmp_path / "image"), NAMES).conf == CONF.encode()


def test_the_rest_of_a_large_image_is_never_unpacked(tmp_path: Path) -> None:
    """What follows ``etc`` may be damaged, and nobody notices: that it is not read is what makes ``verify`` quick."""
    data = archive({"etc/mdadm/mdadm.conf": CONF.encode(), "usr/firmware": os.urandom(1 << 22)})
    whole = packed(data, "gzip")
    (tmp_path / "image").write_bytes(whole[: len(whole) // 2])
    assert read_carried(str(tmp_path / "image"), NAMES).conf == CONF.encode()


@pytest.mark.parametrize("form", ["none", "gzip", "xz", "zstd"])
def test_an_image_that_is_cut_off_is_rebuilt(root: Path, form: str) -> None:
    if form == "zstd":
        need_program(form)
    whole = image(None, form, program=False)
    for length in (0, 3, 50, len(MICROCODE) // 2, len(MICROCODE) + 60, len(whole) - 600):
        put(root, whole[:length] if length else b"")
        judgement = judge_images(PATH, str(root))[0]
        assert judgement.problem or judgement.unknown
        assert check_images(ARRAY, str(root)).status in (FAIL, UNKNOWN)
    put(root, b"")
    assert judge_images(PATH, str(root))[0].problem


# --- rebuilding ---

TOOL = """#!{python}
import sys
sys.path[:0] = [{tests!r}]
from initramfs_images import image
root = {root!r}
conf = open(root + "/etc/mdadm/mdadm.conf").read()
open(root + "/rebuilt", "a").write("once ")
open(root + "/boot/initrd.img-{kernel}", "wb").write(image({conf}))
"""


def tool(root: Path, monkeypatch: pytest.MonkeyPatch, conf: str = "conf") -> None:
    """An update-initramfs that puts mdadm.conf, or what ``conf`` says, into the image."""
    path = root / "usr/sbin/update-initramfs"
    path.parent.mkdir(parents=True, exist_ok=True)
    tests = str(Path(__file__).parents[1])
    path.write_text(TOOL.format(python=sys.executable, tests=tests, root=str(root), kernel=KERNEL, conf=conf))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


def rebuilt(root: Path) -> int:
    return (root / "rebuilt").read_text().count("once") if (root / "rebuilt").exists() else 0


def test_an_image_is_rebuilt_once_and_never_in_check_mode(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(root, monkeypatch)
    path = str(root / f"boot/initrd.img-{KERNEL}")
    looked = renew(PATH, changed=False, acting=False, root=str(root), ours=[UUID])
    assert ([image.path for image in looked.stale], rebuilt(root)) == ([path], 0)
    assert renew(PATH, changed=False, acting=True, root=str(root), ours=[UUID]) == looked
    assert rebuilt(root) == 1
    assert renew(PATH, changed=False, acting=True, root=str(root), ours=[UUID]) == Renewal(())
    assert rebuilt(root) == 1
    # This run has changed the file: the image is rebuilt, whatever it has.
    assert renew(PATH, changed=True, acting=True, root=str(root), ours=[UUID]).left == ()
    assert rebuilt(root) == 2


def test_an_image_that_comes_out_without_the_array_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(root, monkeypatch, conf=repr(HEAD))
    (left,) = renew(PATH, changed=False, acting=True, root=str(root), ours=[UUID]).left
    assert left.problem == f"it lacks `{line_for(NAME, UUID)}`"


def test_an_image_that_lost_its_array_is_rebuilt_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(root, monkeypatch)
    put(root, image(CONF))
    (root / PATH[1:]).write_text(HEAD)
    for _ in range(2):
        assert renew(PATH, changed=False, acting=True, root=str(root), gone=[UUID]).left == ()
    assert rebuilt(root) == 1


def test_an_image_of_unknown_form_is_rebuilt_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(root, monkeypatch)
    put(root, b"\x7fELF" * 100)
    renewed = renew(PATH, changed=False, acting=True, root=str(root), ours=[UUID])
    assert (renewed.stale, len(renewed.unknown), rebuilt(root)) == ((), 1, 0)
    renewed = renew(PATH, changed=True, acting=True, root=str(root), ours=[UUID])
    assert (len(renewed.stale), renewed.unknown, rebuilt(root)) == (1, (), 1)


# --- where nobody can tell ---


def test_an_image_that_cannot_be_read_is_no_pass(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(data: bytes) -> tuple[str, str]:
        put(root, data)
        check = check_images(ARRAY, str(root))
        return check.status, check.found

    assert judged(b"\x7fELF" * 100)[0] == UNKNOWN
    assert judged(MICROCODE + b"hello there" * 100)[0] == UNKNOWN
    if shutil.which("zstd"):
        whole = image(CONF, "zstd")
        assert judged(whole)[0] == PASS
        monkeypatch.setattr(initramfs_reader.shutil, "which", lambda *_, **__: None)
        status, words = judged(whole)
        assert (status, "`zstd`" in words) == (UNKNOWN, True)
    path = put(root, b"")
    path.unlink()
    path.mkdir()
    assert check_images(ARRAY, str(root)).status == UNKNOWN
    path.rmdir()
    os.mkfifo(path)
    assert check_images(ARRAY, str(root)).status == UNKNOWN
    path.unlink()
    path.symlink_to("nowhere")
    assert check_images(ARRAY, str(root)).status == UNKNOWN


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_image_that_may_not_be_read_is_no_pass(root: Path) -> None:
    put(root, image(CONF)).chmod(0)
    assert check_images(ARRAY, str(root)).status == UNKNOWN


def test_without_an_image_or_a_line_there_is_no_pass(root: Path) -> None:
    put(root, image(CONF))
    (root / PATH[1:]).write_text(HEAD)
    check = check_images(ARRAY, str(root))
    assert (check.status, check.found) == (FAIL, f"`{PATH}` has no line for it")
    (root / f"boot/initrd.img-{KERNEL}").unlink()
    assert check_images(ARRAY, str(root)).status == SKIP


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.binary(max_size=400), at=st.integers(0, 20000), cut=st.booleans(), form=st.sampled_from(FORMS[:5]))
def test_no_image_ends_the_run(data: bytes, at: int, cut: bool, form: str, tmp_path: Path) -> None:
    whole = image(CONF, form)
    at %= len(whole)
    path = tmp_path / "image"
    path.write_bytes(whole[:at] + data + (b"" if cut else whole[at + len(data) :]))
    with contextlib.suppress(Damaged, Unreadable):
        assert isinstance(read_carried(str(path), NAMES), Carried)


def test_only_known_programs_rebuild(root: Path) -> None:
    assert initramfs_check.rebuild_command(str(root)) is None
    assert "as this distribution does" in check_images(ARRAY, str(root)).remedy
    (root / "usr/sbin").mkdir(parents=True)
    (root / "usr/sbin/update-initramfs").touch()
    assert "`update-initramfs -u -k all`" in check_images(ARRAY, str(root)).remedy


# --- an image that GRUB names and that is gone ---

OTHER = "6.1.0-28-cloud-amd64"
GRUB_CFG = """\
if [ -s $prefix/grubenv ]; then
  load_env
fi
if [ "${{next_entry}}" ] ; then
   set default="${{next_entry}}"
   set boot_once=true
else
   set default="{default}"
fi
function load_video {{
  insmod all_video
}}
menuentry 'Debian GNU/Linux' --class debian $menuentry_id_option 'gnulinux-simple-1' {{
\tload_video
\tlinux\t{boot}/vmlinuz-{kernel} root=UUID=1 ro quiet
\tinitrd\t{boot}/initrd.img-{kernel}
}}
submenu 'Advanced options for Debian GNU/Linux' $menuentry_id_option 'gnulinux-advanced-1' {{
\tmenuentry 'Debian GNU/Linux, with Linux {kernel}' --class debian $menuentry_id_option 'gnulinux-{kernel}-1' {{
\t\tlinux\t{boot}/vmlinuz-{kernel} root=UUID=1 ro quiet
\t\tinitrd\t{boot}/initrd.img-{kernel}
\t}}
\tmenuentry 'Debian GNU/Linux, with Linux {other}' --class debian $menuentry_id_option 'gnulinux-{other}-1' {{
\t\tlinux\t{boot}/vmlinuz-{other} root=UUID=1 ro quiet
\t\tinitrd\t{boot}/initrd.img-{other}
\t}}
}}
menuentry 'UEFI Firmware Settings' {{
\tfwsetup
}}
"""
OF_OTHER = (
    f"gnulinux-advanced-1>gnulinux-{OTHER}-1",
    f"Advanced options for Debian GNU/Linux>Debian GNU/Linux, with Linux {OTHER}",
    "1>1",
)
"""How `default` names the entry of the other kernel."""


@pytest.fixture
def bootable(root: Path) -> Path:
    """A node with a good image of one kernel, whose default entry is of that kernel; of the other there is none."""
    put(root, image(CONF))
    (root / "boot/grub").mkdir()
    (root / "proc/sys/kernel").mkdir(parents=True)
    grub(root)
    running(root, KERNEL)
    return root


def grub(root: Path, default: str = "0", boot: str = "/boot", saved: str = "") -> None:
    text = GRUB_CFG.format(default=default, boot=boot, kernel=KERNEL, other=OTHER)
    (root / "boot/grub/grub.cfg").write_text(text)
    (root / "boot/grub/grubenv").write_text(f"# GRUB Environment Block\nsaved_entry={saved}\n{'#' * 40}")


def running(root: Path, kernel: str) -> None:
    (root / "proc/sys/kernel/osrelease").write_text(kernel + "\n")


@pytest.mark.parametrize("boot", ["/boot", ""], ids=["on the root file system", "of its own"])
def test_the_image_of_the_default_entry_is_gone(bootable: Path, boot: str) -> None:
    """The node would not boot. Without the image the check had nothing to look into, and was left out."""
    grub(bootable, boot=boot)
    assert check_images(ARRAY, str(bootable)).status == PASS
    (bootable / f"boot/initrd.img-{KERNEL}").unlink()
    check = check_images(ARRAY, str(bootable))
    assert (check.status, check.found) == (
        FAIL,
        f"`{boot}/initrd.img-{KERNEL}` is gone, which the default entry of GRUB names",
    )
    assert "as this distribution does" in check.remedy
    tool = bootable / "usr/sbin/update-initramfs"
    tool.parent.mkdir(parents=True)
    tool.touch()
    assert f"`update-initramfs -c -k {KERNEL}`" in check_images(ARRAY, str(bootable)).remedy
    (bootable / f"lib/modules/{KERNEL}").rmdir()
    assert "is not installed" in check_images(ARRAY, str(bootable)).remedy


def test_an_entry_that_nobody_boots_may_lack_its_image(bootable: Path) -> None:
    (bootable / "lib/modules" / OTHER).mkdir()
    assert check_images(ARRAY, str(bootable)).status == PASS
    running(bootable, OTHER)
    check = check_images(ARRAY, str(bootable))
    assert (check.status, check.found) == (
        FAIL,
        f"`/boot/initrd.img-{OTHER}` is gone, which the entry of the running kernel names",
    )


@pytest.mark.parametrize("default", OF_OTHER)
@pytest.mark.parametrize("saved", [True, False], ids=["saved", "set"])
def test_the_default_entry_is_the_one_that_grub_takes(bootable: Path, default: str, saved: bool) -> None:
    grub(bootable, "${saved_entry}" if saved else default, saved=default if saved else "")
    assert f"initrd.img-{OTHER}` is gone" in check_images(ARRAY, str(bootable)).found
    # What names no entry is the first one, as for GRUB.
    grub(bootable, "${saved_entry}" if saved else "gone>9", saved="")
    assert check_images(ARRAY, str(bootable)).status == PASS


@pytest.mark.parametrize(
    ("saved", "status"), [("", PASS), (f"abc-{KERNEL}", PASS), (f"abc-{OTHER}", FAIL), ("1", FAIL), ("9", PASS)]
)
def test_entries_of_the_boot_loader_specification_count(bootable: Path, saved: str, status: str) -> None:
    """As on Rocky and RHEL; the newest kernel is first."""
    (bootable / "boot/grub").rename(bootable / "boot/grub2")
    (bootable / "boot/grub2/grub.cfg").write_text('set default="${saved_entry}"\ninsmod blscfg\nblscfg\n')
    (bootable / "boot/grub2/grubenv").write_text(f"saved_entry={saved}\n")
    entries = bootable / "boot/loader/entries"
    entries.mkdir(parents=True)
    for kernel in (KERNEL, OTHER):
        text = f"title Rocky Linux ({kernel})\nversion {kernel}\nlinux /vmlinuz-{kernel}\n"
        (entries / f"abc-{kernel}.conf").write_text(text + f"initrd /initrd.img-{kernel} $tuned_initrd\n")
    assert check_images(ARRAY, str(bootable)).status == status


@given(st.text(st.sampled_from("menuentry submenu'\"{}\n \\$>linuxinitrd/=set default"), max_size=200))
def test_no_configuration_of_grub_ends_the_check(text: str) -> None:
    boot_entries.items_of(text)


# --- mdadm.conf ---

CONF_LINES = st.sampled_from(
    [
        "# a comment",
        "",
        " # indented",
        "DEVICE partitions",
        "  containers",
        f"ARRAY /dev/md/theirs metadata=1.2 UUID={OLD}",
        "\tname=node:theirs # why",
        'arr "/dev/md/with blank"',
        "#\udcfc\f\v\u2028\x85",
        "MAILADDR root\r",
        "\r",
        "\fARRAY",
    ]
)


@given(before=st.lists(CONF_LINES, max_size=8), end=st.sampled_from(["", "\n", "\r\n"]))
@example(before=["ARRAY /dev/md/theirs", "# c", f"  UUID={OLD}"], end="")
@example(before=["# only a comment"], end="")
def test_mdadm_conf_edited_and_put_back_is_the_same_to_the_byte(before: list[str], end: str) -> None:
    text = "\n".join(before) + end
    begun = any(line[:1] not in ("", " ", "\t", "#") for line in before)
    changed = conf_with_array(text, NAME, UUID)
    assert conf_with_array(changed, NAME, UUID) == changed
    theirs = [line.words for line in array_lines(text)]
    assert [line.words for line in array_lines(changed) if not line.names(UUID)] == theirs
    assert str(next(line for line in array_lines(changed) if line.names(UUID))) == line_for(NAME, UUID)
    assert changed.replace(line_for(NAME, UUID) + "\n", "", 1).startswith(text)
    back = conf_without_array(changed, UUID)
    # A file with only indented lines and no final line end keeps the line end that our lines needed.
    assert back == text or (not begun and back == text + "\n")
    assert conf_without_array(text, UUID) == text


@pytest.mark.parametrize(
    "old",
    [
        f"ARRAY /dev/md/{NAME} metadata=1.2\n   UUID={OLD}\n",
        f"array {NAME} uuid={OLD}\n",
        f'ARRAY "/dev/md/{NAME}"\n\n# UUID=x\n\tUUID={OLD} # the old one\n',
        f"ARRAY /dev/md127 metadata=1.2 uuid={UUID.replace(':', '-').upper()}\n",
        f"ARRAY /dev/md127 UUID={UUID.replace(':', '')}\nARR /dev/md/{NAME} level=raid0\n",
    ],
)
def test_a_line_about_the_array_is_replaced_in_any_spelling(old: str) -> None:
    after = conf_with_array(HEAD + old + "DEVICE partitions\n", NAME, UUID)
    assert [str(line) for line in array_lines(after)] == [line_for(NAME, UUID)]
    assert after.startswith(HEAD)
    assert after.endswith("DEVICE partitions\n")
    assert conf_without_array(after, UUID).replace("\n# UUID=x\n", "") == HEAD + "DEVICE partitions\n"
