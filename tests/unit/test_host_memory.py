"""Huge pages of 1 GiB through the boot loader, shares per NUMA node, /dev/shm, and real locking of memory."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from programs import need_program
from tunetool.node.common.commands import CommandError, Result
from tunetool.node.common.drift import Difference, Ledger, settle
from tunetool.node.common.refusal import Refusal
from tunetool.node.machine import busy
from tunetool.node.machine.fstab import FstabConflict
from tunetool.node.machine.memory import HugePages
from tunetool.node.memory import apply as memory_apply
from tunetool.node.memory import boot_loader
from tunetool.node.memory.apply import MemoryJob
from tunetool.node.memory.boot_loader import DROPIN_PATH, Grub, Grubby
from tunetool.node.memory.kernel_parameters import (
    carries,
    foreign_pools,
    grubby_lines,
    knows_nodes,
    linux_lines,
    memory_size,
    parameters,
    parse,
    parse_dropin,
    render_dropin,
    without,
)
from tunetool.node.memory.limits import refuse_impossible
from tunetool.node.memory.memory_checks import (
    DEFAULT_LIMIT,
    LOCK_BYTES,
    Attempt,
    child_command,
    lock_checks,
    parse_attempt,
)
from tunetool.node.memory.persistent_files import with_shm

GIB = 2**20
"""In KiB, as page sizes are."""
BOOTED = "root=/dev/vda ro console=ttyS0"


class Kernel:
    """A machine below a root: pools as in sysfs, and a boot loader like Debian's grub-mkconfig."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.can_find = 0
        """Pages of 1 GiB that the running kernel can still put together."""
        self.broken = ""
        for node in (0, 1):
            for size in (2048, GIB):
                self.pool(size, node).parent.mkdir(parents=True)
                self.pool(size, node).write_text("0\n")
            self.write(f"sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal:   {32 * GIB} kB\n")
        for size in (2048, GIB):
            self.pool(size).parent.mkdir(parents=True)
            self.pool(size).write_text("0\n")
        self.write("proc/meminfo", f"MemTotal:       {64 * GIB} kB\nMemAvailable:   {60 * GIB} kB\n")
        self.write("proc/cmdline", BOOTED + "\n")
        self.write("proc/sys/kernel/osrelease", "6.1.0-56-cloud-amd64\n")
        self.write("usr/sbin/grub-mkconfig", "for x in ${sysconfdir}/default/grub.d/*.cfg ; do\n")
        self.write("etc/default/grub", f'GRUB_CMDLINE_LINUX="{BOOTED}"\n')
        self.write("boot/grub/grub.cfg", f"\tlinux\t/boot/vmlinuz-6.1 {BOOTED} \n\tinitrd /boot/initrd.img-6.1\n")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def pool(self, size: int, node: int | None = None) -> Path:
        return self.root / HugePages(size, 0, node).path.lstrip("/")

    def grub_mkconfig(self, argv: list[str], **_: object) -> Result:
        """Sources the same files as Debian's, with a real shell."""
        assert argv[:2] == ["grub-mkconfig", "-o"]
        if self.broken == "fails":
            raise CommandError("`grub-mkconfig` failed with exit status 1: syntax error")
        script = (
            'cd "$1"; . ./etc/default/grub; for x in ./etc/default/grub.d/*.cfg; do [ ! -e "$x" ] || . "$x"; done; '
            'printf "menuentry one {\\n linux /boot/vmlinuz-6.1 %s \\n}\\n" "$GRUB_CMDLINE_LINUX"'
        )
        text = subprocess.run(
            ["sh", "-euc", script, "sh", str(self.root)], capture_output=True, text=True, check=True
        ).stdout
        Path(argv[2]).write_text("menuentry nothing {}\n" if self.broken == "empty" else text)
        return Result(0, "", "")

    def boot(self) -> None:
        """Boot: the kernel gets the boot loader's words and reserves the requested pages."""
        (words,) = linux_lines((self.root / "boot/grub/grub.cfg").read_text())
        self.write("proc/cmdline", " ".join(words) + "\n")
        for size in (2048, GIB):
            self.pool(size).write_text("0\n")
        for pool in parse(words):
            (self.root / pool.path.lstrip("/")).write_text(f"{pool.count}\n")

    def run(self, pages: list[dict[str, Any]], check: bool = False, **wishes: Any) -> tuple[MemoryJob, Ledger]:
        wanted = {
            "hugepages": [{"size": "1GiB", "numa_node": None, **entry} for entry in pages],
            "hugepages_max_share": 50,
            "shm_size": "",
            "shm_huge": "",
            "memlock": "",
            **wishes,
        }

        def work(ledger: Ledger) -> MemoryJob:
            job = MemoryJob(wanted, ledger, str(self.root))
            job.all()
            return job

        return settle(work, None, check)

    @property
    def dropin(self) -> str:
        path = self.root / DROPIN_PATH.lstrip("/")
        return path.read_text() if path.exists() else ""

    @property
    def next_boot(self) -> str:
        return " ".join(linux_lines((self.root / "boot/grub/grub.cfg").read_text())[0])


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel(tmp_path)
    write = MemoryJob.write_pool

    def as_many_as_there_are(job: MemoryJob, pool: HugePages) -> int | None:
        return write(job, replace(pool, count=min(pool.count, made.can_find)) if pool.gigantic else pool)

    monkeypatch.setattr(MemoryJob, "write_pool", as_many_as_there_are)
    monkeypatch.setattr(boot_loader, "run", made.grub_mkconfig)
    return made


@pytest.mark.parametrize(
    ("files", "where"),
    [
        ({"etc/sysctl.d/70-db.conf": "# theirs\nvm.nr_hugepages = 1024\n"}, "`/etc/sysctl.d/70-db.conf` line 2"),
        ({"usr/lib/sysctl.d/1.conf": "-vm/nr_hugepages=0\n"}, "`/usr/lib/sysctl.d/1.conf` line 1"),
        (
            {"etc/sysctl.d/1.conf": "vm.nr_hugepages=64\n", "etc/sysctl.conf": "vm.nr_hugepages=1\n"},
            "sysctl.conf` line 1",
        ),
        ({"etc/sysctl.d/1.conf": "vm.nr_hugepages=1\n", "etc/sysctl.conf": "vm.nr_hugepages=64\n"}, ""),
        # The kernel reads these with any base.
        ({"etc/sysctl.d/1.conf": "vm.nr_hugepages=0x40\n"}, ""),
        ({"etc/sysctl.d/1.conf": "vm.nr_hugepages=0100\n"}, ""),
        ({"etc/sysctl.d/1.conf": "vm.nr_hugepages=064\n"}, "`/etc/sysctl.d/1.conf` line 1"),
        ({"etc/sysctl.d/1.conf": "#vm.nr_hugepages=1\nvm.nr_overcommit_hugepages=9\n"}, ""),
    ],
)
def test_other_huge_pages_in_sysctl_d_are_a_warning(kernel: Kernel, files: dict[str, str], where: str) -> None:
    kernel.write("proc/meminfo", f"MemTotal:       {64 * GIB} kB\nHugepagesize:       2048 kB\n")
    for path, text in files.items():
        kernel.write(path, text)
    _, done = kernel.run([{"size": "2MiB", "count": 64}])
    assert [where in warning and "64 pages are asked for here" in warning for warning in done.warnings] == [
        True
    ] * bool(where)
    # Nothing is asked of that size, so that nothing is contradicted.
    _, done = kernel.run([{"size": "1GiB", "count": 0}])
    assert done.warnings == []


GIGANTIC = st.lists(
    st.builds(HugePages, st.sampled_from([GIB, 16 * GIB]), st.integers(1, 999), st.integers(0, 9)),
    max_size=6,
    unique_by=lambda pool: pool.path,
) | st.lists(
    st.builds(HugePages, st.sampled_from([GIB, 16 * GIB]), st.integers(1, 999)),
    max_size=2,
    unique_by=lambda pool: pool.path,
)


@given(GIGANTIC, st.lists(st.sampled_from(["ro", "quiet", "hugepages=512", "hugepagesz=2M", "iommu=pt"])))
def test_what_is_rendered_is_read_back(pools: list[HugePages], strange: list[str]) -> None:
    words = parameters(pools)
    assert sorted(pool.path for pool in parse(words)) == sorted(pool.path for pool in pools)
    assert sorted(pool.bytes for pool in parse(words)) == sorted(pool.bytes for pool in pools)
    assert parse_dropin(render_dropin(words)) == words
    line = [*strange, *words]
    assert carries(line, words)
    assert without(line, words) == strange
    assert foreign_pools(line, [words]) == []
    assert [pool.path for pool in foreign_pools(line, [])] == [pool.path for pool in parse(words)]


def test_the_words_are_the_kernels_own() -> None:
    assert parameters([HugePages(GIB, 8)]) == ["hugepagesz=1G", "hugepages=8"]
    pools = [HugePages(GIB, 4, 1), HugePages(2048, 99), HugePages(GIB, 2, 0)]
    assert parameters(pools) == ["hugepagesz=1G", "hugepages=0:2,1:4"]
    assert parameters([HugePages(2048, 64), HugePages(GIB, 0)]) == []
    assert not carries(["hugepages=8", "hugepagesz=1G"], ["hugepagesz=1G", "hugepages=8"])
    assert [knows_nodes(release) for release in ("5.15.0-91-generic", "5.16.0", "6.1.0-56-cloud-amd64", "")] == [
        False,
        True,
        True,
        False,
    ]


def test_pages_that_the_running_kernel_lacks_wait_for_a_reboot(kernel: Kernel) -> None:
    kernel.can_find = 1
    job, done = kernel.run([{"count": 2, "numa_node": 1}])
    assert kernel.next_boot == BOOTED + " hugepagesz=1G hugepages=1:2"
    assert job.reboot_reasons == [
        "huge pages: 2 of 1 GiB on NUMA node 1 are asked for, the running kernel has 1; the next boot reserves them"
    ]
    assert [change["before_header"] for change in done.diff] == [
        DROPIN_PATH,
        "/etc/tmpfiles.d/60-tunetool-hugepages.conf",
        HugePages(GIB, 2, 1).path,
    ]
    # Until the reboot, a second run changes nothing, moves no memory, and reports the same.
    kernel.can_find = 2
    again, done = kernel.run([{"count": 2, "numa_node": 1}])
    assert (done.diff, again.reboot_reasons) == ([], job.reboot_reasons)
    kernel.boot()
    after, done = kernel.run([{"count": 2, "numa_node": 1}])
    assert (done.diff, after.reboot_reasons) == ([], [])


def test_pages_that_the_running_kernel_finds_need_no_reboot(kernel: Kernel) -> None:
    kernel.can_find = 4
    job, _ = kernel.run([{"count": 4}])
    assert job.reboot_reasons == []
    assert kernel.pool(GIB).read_text() == "4"
    assert kernel.next_boot.endswith(" hugepagesz=1G hugepages=4")


def test_check_mode_says_what_would_wait_and_writes_nothing(kernel: Kernel) -> None:
    job, done = kernel.run([{"count": 2}], check=True)
    assert len(job.reboot_reasons) == 1
    assert "hugepagesz=1G hugepages=2" in done.diff[0]["after"]
    assert (kernel.dropin, kernel.next_boot) == ("", BOOTED)


def test_what_is_no_longer_asked_for_is_given_back(kernel: Kernel) -> None:
    kernel.can_find = 9
    kernel.run([{"count": 4}])
    job, _ = kernel.run([{"count": 2}])
    assert kernel.next_boot == BOOTED + " hugepagesz=1G hugepages=2"
    assert job.reboot_reasons == []
    job, _ = kernel.run([])
    assert (kernel.next_boot, kernel.dropin, job.reboot_reasons) == (BOOTED, "", [])
    assert kernel.pool(GIB).read_text() == "0"
    _, done = kernel.run([])
    assert done.diff == []


def test_a_boot_that_brought_too_few_fails(kernel: Kernel) -> None:
    kernel.run([{"count": 4}])
    kernel.boot()
    kernel.pool(GIB).write_text("3\n")
    kernel.can_find = 3
    with pytest.raises(Refusal, match="4 huge pages of 1 GiB asked for, the kernel has 3"):
        kernel.run([{"count": 4}])


def test_a_run_cut_before_grub_cfg_is_finished_by_the_next(kernel: Kernel) -> None:
    kernel.write(DROPIN_PATH.lstrip("/"), render_dropin(["hugepagesz=1G", "hugepages=2"]))
    kernel.run([{"count": 2}])
    assert kernel.next_boot.endswith(" hugepagesz=1G hugepages=2")
    (kernel.root / DROPIN_PATH.lstrip("/")).unlink()
    kernel.run([])
    assert kernel.next_boot == BOOTED


@pytest.mark.parametrize(("fault", "says"), [("fails", "syntax error"), ("empty", "it would have no kernel")])
def test_a_boot_configuration_that_cannot_be_made_is_as_before(kernel: Kernel, fault: str, says: str) -> None:
    kernel.can_find = 9
    kernel.run([{"count": 4}])
    before = kernel.dropin, kernel.next_boot
    kernel.broken = fault
    with pytest.raises(Refusal, match=says) as caught:
        kernel.run([{"count": 2}])
    assert "is as it was before" in str(caught.value)
    assert (kernel.dropin, kernel.next_boot) == before
    assert [path.name for path in (kernel.root / "boot/grub").iterdir()] == ["grub.cfg"]


def test_somebody_elses_pages_are_not_doubled(kernel: Kernel) -> None:
    theirs = f'GRUB_CMDLINE_LINUX="{BOOTED} hugepagesz=1G hugepages=16"\n'
    kernel.write("etc/default/grub", theirs)
    kernel.write("boot/grub/grub.cfg", f"linux /boot/vmlinuz-6.1 {BOOTED} hugepagesz=1G hugepages=16\n")
    with pytest.raises(Refusal, match="`hugepagesz=1G hugepages=16` is on the kernel's command line already"):
        kernel.run([{"count": 2}])
    assert kernel.dropin == ""


@pytest.mark.parametrize(
    "words",
    [
        "hugepagesz=1GB hugepages=6",
        "hugepagesz=1g hugepages=6",
        "hugepagesz=0x40000000 hugepages=6",
        "hugepagesz=0x400M hugepages=6",
        "hugepagesz=02000M hugepages=6",
        "hugepagesz=1073741824 hugepages=6",
        'hugepagesz="1G" hugepages=6',
        "hugepagesz=1G hugepages=6pages",
        "default_hugepagesz=1G hugepages=6",
        "default-hugepagesz=1G hugepages=6",
        # The kernel gives the first count, without a size, to the default size that follows.
        "hugepages=6 default_hugepagesz=1G",
        "hugepagesz=2M hugepages=512 default_hugepagesz=1G hugepages=6",
    ],
)
def test_pages_of_others_are_found_as_the_kernel_reads_them(words: str, kernel: Kernel) -> None:
    kernel.write("boot/grub/grub.cfg", f"linux /boot/vmlinuz-6.1 {BOOTED} {words}\n")
    with pytest.raises(Refusal, match="`hugepagesz=1G hugepages=6` is on the kernel's command line already"):
        kernel.run([{"count": 2}])
    assert kernel.dropin == ""


@pytest.mark.parametrize(
    "words",
    [
        "hugepages=6",
        "hugepagesz=2M hugepages=6",
        "hugepagesz=1G",
        "hugepagesz=G hugepages=6",
        "hugepages=6 hugepagesz=1G",
        "default_hugepagesz=2M hugepages=6",
        # What follows is for init.
        "-- hugepagesz=1G hugepages=6",
    ],
)
def test_words_that_reserve_no_such_pages_do_not_count(words: str) -> None:
    assert foreign_pools(words.split(), []) == []


def test_sizes_have_the_kernels_letters_and_bases() -> None:
    sizes = ("1K", "1k", "1M", "1T", "1P", "1E", "0x10", "010", "08", "16G", "0", "1Q", "G", "-1", "")
    assert [memory_size(text) for text in sizes] == [
        1024,
        1024,
        2**20,
        2**40,
        2**50,
        2**60,
        16,
        8,
        0,
        2**34,
        0,
        1,
        None,
        None,
        None,
    ]


def test_an_unknown_boot_loader_is_left_to_its_owner(kernel: Kernel) -> None:
    (kernel.root / "boot/grub/grub.cfg").unlink()
    with pytest.raises(Refusal, match="put `hugepagesz=1G hugepages=2` there yourself"):
        kernel.run([{"count": 2}])
    kernel.write("proc/cmdline", BOOTED + " hugepagesz=1G hugepages=2\n")
    kernel.pool(GIB).write_text("2\n")
    job, _ = kernel.run([{"count": 2}])
    assert job.reboot_reasons == []


def test_an_old_kernel_cannot_reserve_by_numa_node(kernel: Kernel) -> None:
    kernel.write("proc/sys/kernel/osrelease", "5.15.0-91-generic\n")
    with pytest.raises(Refusal, match=r"Linux 5\.15\.0-91-generic cannot reserve 1 GiB pages by NUMA node"):
        kernel.run([{"count": 2, "numa_node": 0}])
    kernel.run([{"count": 2}])


def test_other_pages_never_touch_the_boot_loader(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot_loader, "find", lambda root: pytest.fail("the boot loader was looked at"))
    kernel.run([{"size": "2MiB", "count": 64}])


@pytest.mark.parametrize(
    ("pages", "says"),
    [
        ([{"count": 33}], "33 GiB of 64 GiB RAM, more than 50 %"),
        ([{"count": 17, "numa_node": 0}], "17 GiB of 32 GiB RAM of NUMA node 0, more than 50 %"),
        ([{"count": 15, "numa_node": 1}, {"size": "2MiB", "count": 2048}], "17 GiB of 32 GiB RAM of NUMA node 1"),
        ([{"count": 1, "numa_node": 7}], "NUMA node 7 does not exist"),
        ([{"count": 1, "numa_node": 0}, {"count": 1}], "on NUMA node 0 and over all nodes"),
    ],
)
def test_more_than_a_share_is_refused(kernel: Kernel, pages: list[dict[str, Any]], says: str) -> None:
    if "size" in pages[-1]:
        kernel.write("sys/devices/system/node/node0/meminfo", f"Node 0 MemTotal: {64 * GIB} kB\n")
    with pytest.raises(Refusal, match=says):
        kernel.run(pages)
    assert (kernel.dropin, kernel.pool(2048).read_text()) == ("", "0\n")


def test_a_node_without_memory_has_no_share(kernel: Kernel) -> None:
    kernel.write("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 0 kB\n")
    refuse_impossible([HugePages(GIB, 32)], 50, str(kernel.root))


SHM = "30 22 0:25 / /dev/shm rw,nosuid,nodev - tmpfs tmpfs rw,size=33554432k\n"


def test_shm_beyond_the_ram_or_below_what_is_used_is_refused(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel.write("proc/self/mountinfo", SHM)
    monkeypatch.setattr(memory_apply, "shm_used", lambda root: 5 * 2**30)
    with pytest.raises(Refusal, match="`/dev/shm` of 65 GiB is more than the node's RAM of 64 GiB"):
        kernel.run([], shm_size="65GiB")
    with pytest.raises(Refusal, match="beside huge pages of 30 GiB"):
        kernel.run([{"count": 30}], shm_size="60%")
    with pytest.raises(Refusal, match="cannot be made 4 GiB: 5 GiB are in use there"):
        kernel.run([], shm_size="4GiB")
    assert not (kernel.root / "etc/fstab").exists()
    # On a built node it is a difference like any other, reported with the rest.
    ledger = Ledger({"memory": {"hugepages": []}}, acting=False)
    wanted = {"hugepages": [], "hugepages_max_share": 50, "shm_size": "4GiB", "shm_huge": "", "memlock": ""}
    MemoryJob(wanted, ledger, str(kernel.root)).all()
    assert (
        Difference(
            "memory.shm",
            "4 GiB",
            "32 GiB, and 5 GiB are in use there",
            mended=False,
            hint="end the jobs that use it, look at `ls -l /dev/shm`, or ask for more",
        )
        in ledger.left
    )


OFFERED = "always within_size advise [never] deny force\n"


class Tmpfs:
    """The kernel's side of /dev/shm: `mount -o remount` changes mountinfo, or is refused."""

    def __init__(self, kernel: Kernel, offered: str | None = OFFERED, options: str = "size=33554432k") -> None:
        self.kernel, self.options, self.refuses = kernel, options.split(","), False
        self.ran: list[str] = []
        if offered is not None:
            kernel.write("sys/kernel/mm/transparent_hugepage/shmem_enabled", offered)
        self.show()

    def show(self) -> None:
        line = f"30 22 0:25 / /dev/shm rw,nosuid,nodev - tmpfs tmpfs rw,{','.join(self.options)}\n"
        self.kernel.write("proc/self/mountinfo", line)

    def run(self, argv: list[str], **_: object) -> Result:
        if argv[0] == "systemctl":
            return Result(0, "", "")
        assert argv[:2] == ["mount", "-o"]
        assert argv[3:] == ["/dev/shm"]
        remount, _, option = argv[2].partition(",")
        assert remount == "remount"
        self.ran.append(option)
        name, _, value = option.partition("=")
        if self.refuses and name == "huge":
            raise CommandError("`mount` failed with exit status 32: /dev/shm: bad option")
        if name == "size":
            value = f"{int(value) // 1024}k"
        self.options = [each for each in self.options if not each.startswith(f"{name}=")]
        # tmpfs does not show `huge=never`.
        self.options += [f"{name}={value}"] if value != "never" else []
        self.show()
        return Result(0, "", "")

    @property
    def fstab(self) -> str:
        path = self.kernel.root / "etc/fstab"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def tmpfs(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Tmpfs:
    made = Tmpfs(kernel)
    monkeypatch.setattr(memory_apply, "run", made.run)
    monkeypatch.setattr(memory_apply, "shm_used", lambda root: 0)
    return made


def test_shm_gets_huge_pages_now_and_at_boot_and_once(kernel: Kernel, tmpfs: Tmpfs) -> None:
    _, checked = kernel.run([], shm_huge="within_size", check=True)
    assert (tmpfs.ran, tmpfs.fstab) == ([], "")
    _, done = kernel.run([], shm_huge="within_size")
    assert tmpfs.ran == ["huge=within_size"]
    assert tmpfs.fstab == "tmpfs /dev/shm tmpfs nosuid,nodev,huge=within_size 0 0\n"
    assert done.diff == checked.diff
    assert [(change["before_header"], change["before"], change["after"]) for change in done.diff] == [
        ("/dev/shm", "huge pages never\n", "huge pages within_size\n"),
        ("/etc/fstab", "", tmpfs.fstab),
    ]
    _, again = kernel.run([], shm_huge="within_size")
    assert (again.diff, again.warnings) == ([], [])
    # Left alone, it stays; asked for `never`, it goes, and the entry says so, whatever the kernel's default is.
    _, left = kernel.run([])
    assert left.diff == []
    kernel.run([], shm_huge="never")
    assert tmpfs.options == ["size=33554432k"]
    assert tmpfs.fstab == "tmpfs /dev/shm tmpfs nosuid,nodev,huge=never 0 0\n"


def test_the_manifest_has_what_is_in_force(kernel: Kernel, tmpfs: Tmpfs) -> None:
    wanted = {"hugepages": [], "hugepages_max_share": 50, "shm_size": "", "shm_huge": "within_size", "memlock": ""}
    assert MemoryJob(wanted, Ledger(None, acting=True), str(kernel.root)).all() == {
        "hugepages": [],
        "shm_bytes": None,
        "shm_huge": "within_size",
        "memlock": None,
    }
    none = MemoryJob({**wanted, "shm_huge": ""}, Ledger(None, acting=True), str(kernel.root)).all()
    assert "shm_huge" not in none


def test_on_a_built_node_a_lost_option_is_mended(kernel: Kernel, tmpfs: Tmpfs) -> None:
    ledger = Ledger({"memory": {"hugepages": []}}, acting=True)
    wanted = {"hugepages": [], "hugepages_max_share": 50, "shm_size": "", "shm_huge": "within_size", "memlock": ""}
    MemoryJob(wanted, ledger, str(kernel.root)).all()
    assert ledger.differences[0] == Difference("memory.shm_huge", "within_size", "never")
    assert ledger.left == []


@pytest.mark.parametrize("offered", [None, "always advise [never] deny force\n"])
def test_a_kernel_without_it_gets_never_and_that_is_said(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, offered: str | None
) -> None:
    tmpfs = Tmpfs(kernel, offered)
    monkeypatch.setattr(memory_apply, "run", tmpfs.run)
    # Written under another kernel: this one would refuse the whole entry.
    kernel.write("etc/fstab", "tmpfs /dev/shm tmpfs nosuid,nodev,noexec,huge=within_size 0 0\n")
    job, done = kernel.run([], shm_huge="within_size")
    assert tmpfs.ran == []
    assert "huge=within_size" not in tmpfs.fstab
    assert "noexec" in tmpfs.fstab
    assert len(done.warnings) == 1
    assert "this kernel does not offer `huge=within_size`" in done.warnings[0]
    assert job.all()["shm_huge"] == "never"
    assert kernel.run([], shm_huge="within_size")[1].diff == []


def test_what_the_kernel_refuses_does_not_come_with_a_boot(kernel: Kernel, tmpfs: Tmpfs) -> None:
    tmpfs.refuses = True
    _, done = kernel.run([], shm_huge="within_size")
    assert "`/dev/shm` stays at `huge=never`" in done.warnings[0]
    assert "bad option" in done.warnings[0]
    assert "within_size" not in tmpfs.fstab


def test_a_kernel_that_denies_all_of_it_is_named(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    tmpfs = Tmpfs(kernel, OFFERED.replace("[never] deny", "never [deny]"))
    monkeypatch.setattr(memory_apply, "run", tmpfs.run)
    _, done = kernel.run([], shm_huge="within_size")
    assert tmpfs.ran == ["huge=within_size"]
    assert "has no effect while" in done.warnings[0]


def test_a_dev_shm_that_is_no_tmpfs_is_left_alone(kernel: Kernel, tmpfs: Tmpfs) -> None:
    line = "30 22 0:25 /shm /dev/shm rw - xfs /dev/sda1 rw\n"
    for mountinfo in (line, ""):
        kernel.write("proc/self/mountinfo", mountinfo)
        _, done = kernel.run([], shm_huge="within_size")
        assert (tmpfs.ran, tmpfs.fstab, done.diff) == ([], "", [])
        assert "no tmpfs" in done.warnings[0]


@pytest.mark.parametrize(
    ("before", "size", "huge", "after"),
    [
        ("", None, "within_size", "tmpfs /dev/shm tmpfs nosuid,nodev,huge=within_size 0 0\n"),
        ("", 4096, "within_size", "tmpfs /dev/shm tmpfs nosuid,nodev,size=4096,huge=within_size 0 0\n"),
        ("", 4096, "", "tmpfs /dev/shm tmpfs nosuid,nodev,size=4096 0 0\n"),
        ("", None, "", ""),
        ("", None, None, ""),
        # What the owner wrote beside it stays where only the huge pages are ours.
        ("shm /dev/shm tmpfs noexec,size=9g 0 0\n", None, "always", "tmpfs /dev/shm tmpfs noexec,size=9g,huge=always 0 0\n"),
        ("shm /dev/shm tmpfs noexec,huge=advise 0 0\n", None, "advise", "shm /dev/shm tmpfs noexec,huge=advise 0 0\n"),
        ("shm /dev/shm tmpfs huge=advise 0 0\n", 4096, None, "tmpfs /dev/shm tmpfs nosuid,nodev,size=4096,huge=advise 0 0\n"),
        ("tmpfs /dev/shm tmpfs huge=advise 0 0\n", None, "", "tmpfs /dev/shm tmpfs nosuid,nodev 0 0\n"),
        ("/a /dev/shm none bind 0 0\n", None, "", "/a /dev/shm none bind 0 0\n"),
    ],
)  # fmt: skip
def test_the_entry_of_shm_has_what_was_asked_for(before: str, size: int | None, huge: str | None, after: str) -> None:
    assert with_shm(before, size, huge) == after
    assert with_shm(after, size, huge) == after


def test_an_entry_for_something_else_becomes_no_tmpfs() -> None:
    with pytest.raises(FstabConflict, match="line 1 mounts no tmpfs at `/dev/shm`"):
        with_shm("/a /dev/shm none bind 0 0\n", None, "within_size")


# As grubby of Fedora prints it (grubby-bls, display_info_values).
INFO = """index=0
kernel="/boot/vmlinuz-5.14.0-427.el9.x86_64"
args="ro crashkernel=1G-4G:192M,4G-64G:256M rhgb quiet $tuned_params{0}"
root="/dev/mapper/rl-root"
initrd="/boot/initramfs-5.14.0-427.el9.x86_64.img $tuned_initrd"
title="Rocky Linux (5.14.0-427.el9.x86_64) 9.4 (Blue Onyx)"
id="9d2c-5.14.0-427.el9.x86_64"
index=1
kernel="/boot/vmlinuz-0-rescue-9d2c"
args="ro crashkernel=1G-4G:192M,4G-64G:256M rhgb quiet{0}"
root="/dev/mapper/rl-root"
initrd="/boot/initramfs-0-rescue-9d2c.img"
title="Rocky Linux (0-rescue-9d2c) 9.4 (Blue Onyx)"
id="9d2c-0-rescue"
"""


class FakeGrubby:
    """Answers as grubby does: words are removed by their text, and appended."""

    def __init__(self, words: str = "", loses: str = "") -> None:
        self.words = words.split()
        self.loses = loses
        self.ran: list[list[str]] = []

    def run(self, argv: list[str], **_: object) -> Result:
        assert argv[0] == "grubby"
        if argv[1] == "--info=ALL":
            return Result(0, INFO.format("".join(" " + word for word in self.words)), "")
        assert argv[1] == "--update-kernel=ALL"
        self.ran.append(argv[2:])
        option, _, text = argv[2].partition("=")
        if option == "--remove-args":
            self.words = [word for word in self.words if word not in text.split()]
        else:
            self.words += [word for word in text.split() if word != self.loses]
        return Result(0, "", "")


def test_grubby_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGrubby("hugepagesz=1G hugepages=4")
    monkeypatch.setattr(boot_loader, "run", fake.run)
    assert [line[-2:] for line in grubby_lines(fake.run(["grubby", "--info=ALL"]).stdout)] == [
        ["hugepagesz=1G", "hugepages=4"]
    ] * 2
    new = ["hugepagesz=1G", "hugepages=0:2,1:2"]
    Grubby().put(new, ["hugepagesz=1G", "hugepages=4"])
    assert fake.ran == [["--remove-args=hugepagesz=1G hugepages=4"], ["--args=hugepagesz=1G hugepages=0:2,1:2"]]
    Grubby().put([], new)
    assert fake.words == []


def test_grubby_that_makes_something_else_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGrubby("hugepagesz=1G hugepages=4", loses="hugepages=8")
    monkeypatch.setattr(boot_loader, "run", fake.run)
    with pytest.raises(Refusal, match=r"`hugepagesz=1G hugepages=8` is missing from .* was put back"):
        Grubby().put(["hugepagesz=1G", "hugepages=8"], ["hugepagesz=1G", "hugepages=4"])
    assert fake.words == ["hugepagesz=1G", "hugepages=4"]


def test_grubby_that_cannot_even_be_undone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGrubby("hugepagesz=1G hugepages=4")

    def breaks(argv: list[str], **_: object) -> Result:
        if len(fake.ran) == 1 and argv[1] != "--info=ALL":
            raise CommandError("`grubby` failed with exit status 1: no space left")
        return fake.run(argv)

    monkeypatch.setattr(boot_loader, "run", breaks)
    with pytest.raises(Refusal, match=r"could not be put back .*no space left") as caught:
        Grubby().put(["hugepagesz=1G", "hugepages=8"], ["hugepagesz=1G", "hugepages=4"])
    assert "was put back" not in str(caught.value)


def test_grubby_would_mix_up_somebody_elses_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGrubby("hugepages=512")
    monkeypatch.setattr(boot_loader, "run", fake.run)
    with pytest.raises(Refusal, match="`hugepages=512` is on the kernel's command line, and grubby cannot keep"):
        Grubby().put(["hugepagesz=1G", "hugepages=8"], [])
    assert fake.ran == []


def test_the_boot_loader_is_found_by_its_own_files(kernel: Kernel) -> None:
    assert isinstance(boot_loader.find(str(kernel.root)), Grub)
    kernel.write("usr/sbin/grub-mkconfig", "upstream's reads /etc/default/grub alone\n")
    assert boot_loader.find(str(kernel.root)) is None
    kernel.write("usr/sbin/grubby", "")
    assert isinstance(boot_loader.find(str(kernel.root)), Grubby)


def attempt(**changes: Any) -> Attempt:
    return replace(Attempt(65534, False, -1, LOCK_BYTES), **changes)


@pytest.mark.parametrize(
    ("wanted", "got", "status", "message"),
    [
        ("unlimited", attempt(), "pass", "locked, limit unlimited"),
        ("unlimited", attempt(limit=2**30), "fail", "locked, limit 1 GiB"),
        (str(2**20), attempt(limit=2**30), "pass", "locked, limit 1 GiB"),
        (
            "unlimited",
            attempt(limit=DEFAULT_LIMIT, locked=0, error="Cannot allocate memory"),
            "fail",
            "locked nothing (Cannot allocate memory), limit 8 MiB",
        ),
        ("unlimited", attempt(uid=0), "unknown", "the child kept root's rights"),
        ("unlimited", attempt(can_pass_limits=True), "unknown", "the child kept root's rights"),
    ],
)
def test_locking_is_judged_by_what_an_ordinary_user_got(
    kernel: Kernel, wanted: str, got: Attempt, status: str, message: str
) -> None:
    asked: list[tuple[str, int]] = []

    def locker(kind: str, size: int) -> Attempt:
        asked.append((kind, size))
        return got

    (check,) = lock_checks(wanted, ["login"], locker, str(kernel.root))
    assert (check.id, check.status, check.found) == ("memory.memlock.login", status, message)
    assert asked == [("login", LOCK_BYTES)]
    assert bool(check.remedy) == (status != "pass")


def test_too_little_free_memory_proves_nothing(kernel: Kernel) -> None:
    kernel.write("proc/meminfo", f"MemTotal: {64 * GIB} kB\nMemAvailable: {32 * 1024} kB\n")
    (check,) = lock_checks("unlimited", ["login"], lambda kind, size: attempt(locked=size), str(kernel.root))
    assert check.status == "unknown"


def test_memory_is_really_locked_under_a_real_limit() -> None:
    need_program("prlimit", "setpriv")

    def limited(size: int, limit: int) -> Attempt:
        user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
        command = ["prlimit", f"--memlock={limit}:{limit}", *user, *child_command(size)]
        return parse_attempt(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    fits = limited(32 * 1024, 64 * 1024)
    assert (fits.locked >= 32 * 1024, fits.error) == (True, "")
    short = limited(128 * 1024, 64 * 1024)
    assert (short.locked, short.limit, bool(short.error)) == (0, 64 * 1024, True)


def test_what_a_reboot_would_end(tmp_path: Path) -> None:
    for pid, name, title in (
        (70, "slurmstepd", b"slurmstepd: [614.batch]"),
        (71, "python3", b"python3"),
        (72, "nvidia-persiste", b"nvidia-persistenced"),
    ):
        (tmp_path / f"proc/{pid}/fd").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/comm").write_text(name + "\n")
        (tmp_path / f"proc/{pid}/cmdline").write_bytes(title)
    for pid, number, target in ((71, 3, "/dev/nvidia0"), (71, 4, "/dev/nvidia1"), (72, 3, "/dev/nvidia0")):
        (tmp_path / f"proc/{pid}/fd/{number}").symlink_to(target)
    (tmp_path / "proc/70/fd/3").symlink_to("/dev/nvidiactl")
    ended = busy.killed_by_a_reboot("", {}, str(tmp_path))
    assert ended == ["Slurm job 614 runs on this node", "process 71 (`python3`) has a GPU open"]
    assert busy.killed_by_a_reboot("", {"SLURM_JOB_ID": "614"}, str(tmp_path)) == ended[1:]
