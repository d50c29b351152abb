"""A teardown on the files of a node, in a mount namespace: all of tunetool's goes, nothing else does, whenever it is cut."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calls import call
from initramfs_images import image
from machines import RECORDED
from skips import no_mounts
from tunetool.node.array.initramfs_reader import read_carried
from tunetool.node.array.mdadm_conf import conf_with_array
from tunetool.node.common import manifest as manifests
from tunetool.node.ephemeral import boot_decision, boot_unit
from tunetool.node.health import health_units, settings
from tunetool.node.job_scratch import scratch_units
from tunetool.node.job_scratch import settings as job_settings
from tunetool.node.machine.fstab import with_entry
from tunetool.node.volume import late_mount, unit_dropins

TESTS = Path(__file__).parents[1]
MANIFEST: dict[str, Any] = json.loads((RECORDED / "built-manifest.json").read_text())
UUID, ARRAY = MANIFEST["filesystem"]["uuid"], MANIFEST["array"]["uuid"]
UNITS = unit_dropins.UNITS_DIRECTORY[len("/etc/") :]
THEIRS = {
    "os-release": "ID=debian\n",
    "fstab": "# fr\udcfc\nUUID=1 / ext4 defaults 0 1\r\n# end\f",
    "mdadm/mdadm.conf": "HOMEHOST <system>\nARRAY /dev/md/theirs UUID=00000000:11111111:22222222:33333333\n",
    f"{UNITS}/slurmd.service.d/10-theirs.conf": "[Unit]\nRequiresMountsFor=/mnt/nvme_raid0\n",
    f"{UNITS}/other.service.d/{unit_dropins.FILE_NAME}": "# theirs, by our name\n[Unit]\n",
    f"{UNITS}/multi-user.target.wants/theirs.service": "-> ../theirs.service",
    f"{UNITS}/{unit_dropins.device_unit(UUID)}.wants/theirs.service": "-> ../theirs.service",
    "tunetool/io-tuning.json": "{}\n",
    "udev/rules.d/90-tunetool-io.rules": "# settings of the host stay\n",
    "prom/node.prom": "theirs 1\n",
    "tool/tunetool": "the program\n",
}
"""What stays, under /etc. A link is ``-> TARGET``."""
TOOL = "/etc/tool/tunetool"
DRAINED = "var/lib/tunetool/health/drained.json"
"""Stays too: only with this note a drain in Slurm is taken back, once the node is built anew."""

PROGRAM = f"""
import ctypes, json, os, shutil, sys
from pathlib import Path
sys.path[:0] = [{str(TESTS)!r}]
import stops
from tunetool.node.array import initramfs_check
from tunetool.node.common.drift import Ledger
from tunetool.node.plan.plan_file import TEARDOWN
from tunetool.node.removal.apply import Job
from tunetool.node.removal.decision import plan_removal
from tunetool.node.removal.facts import look

base, point = Path(sys.argv[1]), sys.argv[2]
libc = ctypes.CDLL(None)
# No installed kernel here has the version of the image.
initramfs_check._is_kernel = lambda version, root: True


def over(source, target):
    kind = b"tmpfs" if source is None else None
    if libc.mount(os.fsencode(source or "none"), target.encode(), kind, 0 if kind else 4096, None):
        sys.exit("no mount at " + target)


def teardown(tree, at=None, log=None):
    "In a child, whose /etc and /boot are those of the tree, and which sees no drives; its exit status."
    pid = os.fork()
    if not pid:
        libc.unshare(0x20000)  # CLONE_NEWNS
        over(None, "/run")
        over(None, "/sys")
        over(tree / "etc", "/etc")
        over(tree / "boot", "/boot")
        over(tree / "sbin", "/usr/local/sbin")
        over(tree / "var/lib", "/var/lib")
        over(tree / "mnt", point)
        if log:
            stops.install(Path("/etc"), log, at)
        machine, _ = look()
        removal = plan_removal(machine, "nvme_raid0", point + "/nvme_raid0")
        if not removal.done:
            job = Job(removal, removal.volume, TEARDOWN, {TOOL!r}, Ledger(None, acting=True))
            job.refuse_if_busy()
            job.run({{}})
        os._exit(7 if removal.done else 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def shown(tree):
    entries = {{}}
    for path in sorted(tree.rglob("*")):
        name = str(path.relative_to(tree))
        if path.is_symlink():
            entries[name] = "-> " + os.readlink(path)
        elif path.is_file() and "/initrd" not in name:
            entries[name] = path.read_bytes().decode("latin-1")
        elif path.is_dir() and not any(path.iterdir()):
            entries[name] = "(empty)"
    return entries


answer = []
node = base / "node"
shutil.copytree(node, base / "0", symlinks=True)
assert teardown(base / "0", log=base / "points") == 0
points = stops.points(base / "points")
for number in range(-1, len(points)):
    tree = base / f"cut{{number}}"
    shutil.copytree(node, tree, symlinks=True)
    first = teardown(tree, number, base / f"log{{number}}") if number >= 0 else teardown(tree)
    second = teardown(tree)
    third = teardown(tree)
    answer.append([points[number] if number >= 0 else "", first, second, third, shown(tree), str(tree)])
print(json.dumps(answer))
"""


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            path.symlink_to(text[3:])
        else:
            path.write_bytes(text.encode("utf-8", "surrogateescape"))


def node(root: Path, point: str) -> None:
    """The files of a built node in ephemeral mode, with a service that needs the volume, a volume that is mounted late,
    a rebuild at boot that was cut, and a health check with its results."""
    built = {**MANIFEST, "filesystem": {**MANIFEST["filesystem"], "mount_point": point}}
    etc = root / "etc"
    put(etc, THEIRS)
    fstab = with_entry(THEIRS["fstab"], f"UUID={UUID}", point, "xfs", "noatime,nofail")
    conf = conf_with_array(THEIRS["mdadm/mdadm.conf"], "nvme_raid0", ARRAY)
    put(etc, {"fstab": fstab, "mdadm/mdadm.conf": conf})
    ours = [
        *unit_dropins.changes(["slurmd.service", "job@.timer"], [point], str(etc / UNITS)),
        *late_mount.changes(late_mount.files(point, UUID), str(root)),
        *boot_unit.changes(boot_unit.files(built, "/opt/tunetool/bin/tunetool", ["slurmd.service"], "{}\n"), str(root)),
    ]
    for change in ours:
        unit_dropins.apply(change)
    put(root, health_units.files(TOOL, settings.dump(900, 0, "/etc/prom", []), 900, "/run/health.sock"))
    jobs = {"directory": f"{point}/jobs", "limit": "", "by_request": False, "textfile_directory": "/etc/prom"}
    put(root, scratch_units.files(TOOL, job_settings.dump(jobs, point), point, f"{point}/jobs"))
    put(root, {f"/etc/prom/{name}": "old 1\n" for name in (*health_units.METRICS, scratch_units.METRICS)})
    put(root, {boot_decision.BEGUN_PATH: f"{ARRAY}\n", settings.MEASURED_PATH: "{}\n", DRAINED: "{}\n"})
    manifests.write(built, str(root / manifests.MANIFEST_PATH[1:]))
    (root / "mnt/nvme_raid0").mkdir(parents=True)
    (root / "boot").mkdir()
    (root / "boot/initrd.img-6.1").write_bytes(image(conf))
    tool = root / "sbin/update-initramfs"
    tool.parent.mkdir()
    tool.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path[:0] = [{str(TESTS)!r}]\nfrom initramfs_images import image\n"
        "conf = open('/etc/mdadm/mdadm.conf').read()\n"
        "open('/boot/initrd.img-6.1', 'wb').write(image(conf))\n"
    )
    tool.chmod(0o755)


def on_a_node(
    tmp_path: Path, program: str, argument: Path, change: Callable[[Path], object] = lambda tree: None
) -> tuple[str, Path]:
    """What the program prints in a mount namespace of its own, where the node's volume is below the path returned.

    ``change`` is made to the node's files before."""
    if no_mounts():
        pytest.skip("this user may not make a mount namespace")
    point = tmp_path / "point"
    point.mkdir()
    node(tmp_path / "node", f"{point}/nvme_raid0")
    change(tmp_path / "node")
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    done = call("unshare", *user, "--mount", sys.executable, "-c", program, str(argument), str(point))
    assert done.returncode == 0, done.stderr
    return done.stdout, point


def test_a_teardown_that_is_cut_anywhere_is_finished_by_the_next(tmp_path: Path) -> None:
    said, _ = on_a_node(tmp_path, PROGRAM, tmp_path)
    answers = json.loads(said)
    told = [at for at, *_ in answers]
    # Whatever is added to a teardown is cut here too. Between these two, the image still has the array.
    assert any(at == "rename /mdadm/mdadm.conf" for at in told), told
    assert any(late_mount.UNIT in at for at in told), told
    assert any(health_units.TIMER in at for at in told), told
    expected = {
        f"etc/{name}": text.encode("utf-8", "surrogateescape").decode("latin-1") for name, text in THEIRS.items()
    }
    for at, first, second, third, left, tree in answers:
        # 7: there is no volume any more.
        assert (first, third) == (-9 if at else 0, 7), at
        assert second == 0 or (second == 7 and ("node.json" in at or not at or "rmdir" in at)), at
        theirs = {name: text for name, text in left.items() if not name.startswith("sbin/")}
        if at:
            # A cut removal leaves the directory of what is removed.
            cut = [name for name, text in theirs.items() if text == "(empty)" and name != "mnt"]
            assert len(cut) <= 1, at
            theirs = {name: text for name, text in theirs.items() if name not in cut}
        assert theirs == {**expected, "mnt": "(empty)", DRAINED: "{}\n"}, at
        conf = read_carried(f"{tree}/boot/initrd.img-6.1", ("etc/mdadm/mdadm.conf",)).conf
        assert conf == THEIRS["mdadm/mdadm.conf"].encode(), at


OVER = """
import ctypes, os, sys
from pathlib import Path
from tunetool.node.common.refusal import Refusal
from tunetool.node.common.drift import Ledger
from tunetool.node.plan.plan_file import TEARDOWN
from tunetool.node.removal.apply import Job
from tunetool.node.removal.decision import plan_removal
from tunetool.node.removal.facts import look

tree, point = Path(sys.argv[1]), Path(sys.argv[2])


def over(source, target):
    kind = None if source else b"tmpfs"
    if ctypes.CDLL(None).mount(os.fsencode(source or "none"), os.fsencode(target), kind, 0 if kind else 4096, None):
        sys.exit("no mount at %s" % target)


over(None, "/run")
over(None, "/sys")
over(tree / "etc", "/etc")
"""
"""What the programs below begin with: a node without drives."""

HIDDEN = (
    OVER
    + """
machine, _ = look()
removal = plan_removal(machine, "nvme_raid0", str(point / "nvme_raid0"))
job = Job(removal, removal.volume, TEARDOWN, "/opt/tunetool/bin/tunetool", Ledger(None, acting=False))
job.refuse_if_busy()
over(None, point)
(point / "nvme_raid0").mkdir()
over(None, point / "nvme_raid0")
over(None, point)
try:
    job.refuse_if_busy()
except Refusal as refusal:
    print(refusal)
"""
)


def test_a_volume_that_another_mount_hides_is_not_torn_down(tmp_path: Path) -> None:
    """It cannot be unmounted by its path, which --check has to say too."""
    said, point = on_a_node(tmp_path, HIDDEN, tmp_path / "node")
    assert said == (
        f"`{point}/nvme_raid0` is hidden by a mount of `none` at `{point}`. hint: nothing was changed; unmount that first\n"
    )


WITH_SYSTEMD = (
    OVER
    + f"""
import json
from ansible.module_utils.testing import patch_module_args
sys.path.append({str(TESTS.parent / ".ansible/collections")!r})
from ansible_collections.tunetool.node.plugins.modules import scratch_removal as module
from tunetool.node.array import initramfs_check

initramfs_check._is_kernel = lambda version, root: True
for name, target in {{"boot": "/boot", "sbin": "/usr/local/sbin", "var/lib": "/var/lib", "mnt": point}}.items():
    over(tree / name, target)
Path("/run/systemd/system").mkdir(parents=True)
os.environ["PATH"] = "/usr/local/sbin:" + os.environ["PATH"]
volume = str(point / "nvme_raid0")


def calls():
    log = Path("/run/calls")
    return log.read_text().splitlines() if log.exists() else []


def run(check_mode=False, **more):
    "The module as Ansible runs it, in a child; its result."
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(writing, 1)
        given = dict(job="teardown", array={{"name": "nvme_raid0"}}, mount_point=volume, program={TOOL!r}, **more)
        with patch_module_args(dict(given, _ansible_check_mode=check_mode, _ansible_diff=True)):
            module.main()
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as stream:
        return json.load(stream)


def mounted(check_mode=False):
    "The same job where something is mounted, which is no array; its diff."
    machine, _ = look()
    removal = plan_removal(machine, "nvme_raid0", volume)
    job = Job(removal, removal.volume, TEARDOWN, {TOOL!r}, Ledger(None, not check_mode))
    job.run({{}})
    return [entry["before_header"] for entry in job.ledger.diff]


def there():
    return sorted(str(path) for path in Path("/etc").rglob("*health*"))


"""
)
"""For a node whose systemd is a script that keeps its calls. The timer and the socket run until a stop."""

SYSTEMCTL = """#!/bin/sh
if [ "$1" != is-active ]; then
    echo "systemctl $*" >> /run/calls
    exit 0
fi
shift
for unit; do
    grep -qs "^systemctl stop .*$unit" /run/calls && echo inactive || echo active
done
"""
UMOUNT = f"""#!/bin/sh
echo "umount $*" >> /run/calls
[ ! -e /run/busy ] || {{ echo "umount: $1: target is busy." >&2; exit 32; }}
exec {shutil.which("umount")} "$@"
"""
STOPS = [
    f"systemctl stop {health_units.TIMER}",
    " ".join(["systemctl stop", *health_units.to_stop(False, False)]),
]
"""Between them a check that runs is waited for."""
BOTH = "the health check and `tunetool-scratch`"
STOP_SWEEPS = f"systemctl stop {scratch_units.TIMER} {scratch_units.SERVICE}"


def with_systemd(tmp_path: Path, program: str, change: Callable[[Path], object] = lambda tree: None) -> Any:
    """What a program answers, which goes on from ``WITH_SYSTEMD``."""
    pytest.importorskip("ansible", reason="Ansible's control side needs Python 3.11")

    def changed(tree: Path) -> None:
        for name, text in {"systemctl": SYSTEMCTL, "umount": UMOUNT}.items():
            (tree / "sbin" / name).write_text(text)
            (tree / "sbin" / name).chmod(0o755)
        change(tree)

    said, _ = on_a_node(tmp_path, WITH_SYSTEMD + program, tmp_path / "node", changed)
    return json.loads(said)


def test_the_health_check_stops_before_the_volume_is_unmounted(tmp_path: Path) -> None:
    """A check in between misses the volume, and Slurm's program drains the node."""
    program = """
over(None, volume)
print(json.dumps([mounted(check_mode=True), calls(), mounted(), calls()]))
"""
    would, before, diff, after = with_systemd(tmp_path, program)
    volume = f"{tmp_path}/point/nvme_raid0"
    assert before == []
    assert diff == would
    assert diff[:4] == [health_units.TIMER, health_units.SOCKET, scratch_units.TIMER, f"mount {volume}"]
    assert after[:4] == [*STOPS, STOP_SWEEPS, f"umount {volume}"]
    assert diff.index(f"{unit_dropins.UNITS_DIRECTORY}/{health_units.TIMER}") < diff.index("/etc/fstab")


def test_a_volume_that_stays_mounted_keeps_its_health_check(tmp_path: Path) -> None:
    program = """
over(None, volume)
Path("/run/busy").touch()
before = there()
try:
    mounted()
except Exception as error:
    print(json.dumps([str(error), there() == before, calls()]))
"""
    error, is_kept, ran = with_systemd(tmp_path, program)
    assert "target is busy" in error
    assert is_kept
    start = f"systemctl start {health_units.TIMER} {health_units.SOCKET}"
    again = f"systemctl start {scratch_units.TIMER}"
    assert ran == [*STOPS, STOP_SWEEPS, f"umount {tmp_path}/point/nvme_raid0", again, start]


def test_without_a_manifest_the_health_check_goes_as_well(tmp_path: Path) -> None:
    program = """
plan, would = run(plan=True), run(check_mode=True)
before = there()
done = run()
print(json.dumps([plan, would, before, done, there(), run(), calls()]))
"""
    plan, would, before, done, left, again, ran = with_systemd(
        tmp_path, program, lambda tree: (tree / "etc/tunetool/node.json").unlink()
    )
    assert plan["msg"].endswith(f"nothing to remove but {BOTH}")
    assert plan["plan"]["array_action"] == "nothing"
    assert not plan["changed"]
    assert before
    assert left == []
    assert (would["changed"], would["diff"], would["msg"]) == (done["changed"], done["diff"], done["msg"])
    assert done["changed"]
    assert done["msg"] == f"nothing to remove but {BOTH}"
    assert (again["changed"], again["msg"]) == (False, "nothing to remove")
    assert ran[:2] == STOPS
    assert ran[-1] == "systemctl daemon-reload"


def test_the_health_check_of_a_volume_that_is_the_owners_stays(tmp_path: Path) -> None:
    def owners(tree: Path) -> None:
        manifests.write({**MANIFEST, "array": None}, str(tree / manifests.MANIFEST_PATH[1:]))

    before, done, left, ran = with_systemd(tmp_path, "print(json.dumps([there(), run(), there(), calls()]))", owners)
    assert before == left
    assert (done["changed"], done["msg"], ran) == (False, "nothing to remove", [])


def test_a_file_that_stays_is_an_error_by_name(tmp_path: Path) -> None:
    def in_the_way(tree: Path) -> None:
        metrics = tree / "etc/prom" / health_units.METRICS[0]
        metrics.unlink()
        metrics.mkdir()

    program = """
blocked = run(volume=dict(uuid=array))
Path("/etc/prom/tunetool-health.prom").rmdir()
print(json.dumps([blocked, run(volume=dict(uuid=array)), there()]))
"""
    blocked, done, left = with_systemd(tmp_path, f"array = {ARRAY!r}{program}", in_the_way)
    assert blocked["failed"]
    assert blocked["msg"].startswith("`/etc/prom/tunetool-health.prom`: Is a directory. hint: ")
    assert done["changed"]
    assert left == []
