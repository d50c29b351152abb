"""The guest's root file system: built once by mmdebstrap and mke2fs, then kept in the cache.

Nothing is mounted: mke2fs fills the file system from a directory, so that it works without loop devices
and, through mmdebstrap's user namespace, without root.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.lab import recipe
from tunetool.lab.programs import failure_of, require, require_space
from tunetool.lab.qemu import undisturbed
from tunetool.lab.state import InDirectory

BUILD_TIMEOUT_SECONDS = 1800
CACHE_BYTES = 3 * 2**29
TREE_BYTES = 2**30
_FIRST_DESCRIPTOR = 100


@dataclass(frozen=True)
class Image:
    """A finished image in the cache."""

    os_name: str
    directory: Path

    root = InDirectory("root.img")
    """The raw root file system. Never written: nodes write to an overlay."""
    kernel = InDirectory("vmlinuz")
    """The kernel of the first boot."""
    initrd = InDirectory("initrd.img")
    """The initramfs of the first boot."""
    loader = InDirectory("grub")
    """GRUB as a kernel image: boots the kernel on the node's own disk, at a reset of the node too."""
    key = InDirectory("id_ed25519")
    """The private ssh key for root on every node of this image."""


def ensure_image(os_name: str, cache: Path, say: Callable[[str], None], *, fresh: bool = False) -> Image:
    """The newest image for ``os_name``, built when the cache has none or ``fresh`` asks for a new one.

    The caller holds the cache's lock. A fresh image gets a directory of its own: nodes that run on the older
    one keep it.
    """
    prefix = f"image-{os_name}-{recipe.fingerprint(os_name)}-"
    existing = sorted(cache.glob(prefix + "*"), key=lambda path: path.stat().st_mtime)
    if existing and not fresh:
        return Image(os_name, existing[-1])
    require("mmdebstrap", "mke2fs", "ssh-keygen", *(() if os.geteuid() == 0 else ("newuidmap",)))
    require_space(cache, CACHE_BYTES, "the image and a snapshot")
    require_space(Path(tempfile.gettempdir()), TREE_BYTES, "the image's files while it is built")
    work = Path(tempfile.mkdtemp(prefix=".building-", dir=cache))
    target = cache / f"{prefix}{secrets.token_hex(3)}"
    try:
        _build(os_name, work, say)
        # A rename, so that an interrupted build never looks like a finished one.
        (work / "out").rename(target)
        (cache / "build-failed.log").unlink(missing_ok=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Image(os_name, target)


def prune(cache: Path, os_name: str, keep: set[Path]) -> None:
    """Remove what interrupted builds left, and older images of this system that no node uses."""
    remove_unfinished(cache)
    for path in cache.glob(f"image-{os_name}-*"):
        if path not in keep and not _in_use(path):
            shutil.rmtree(path, ignore_errors=True)


def remove_unfinished(cache: Path) -> None:
    """Remove what interrupted builds left. The caller holds the cache's lock."""
    for path in [*cache.glob(".building-*"), *cache.glob("image-*/.building-*")]:
        shutil.rmtree(path, ignore_errors=True)


def _in_use(directory: Path) -> bool:
    # Another lab (TUNETOOL_LAB_DIR) may use it; QEMU holds the files open as long as it runs.
    prefix = str(directory) + "/"
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(link.readlink()).startswith(prefix):
                return True
        except OSError:
            continue
    return False


def _build(os_name: str, work: Path, say: Callable[[str], None]) -> None:
    out = work / "out"
    out.mkdir()
    keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "tunetool-lab", "-f", str(out / "id_ed25519")]
    if (error := failure_of(keygen)) is not None:
        raise CannotJudge(f"`ssh-keygen` failed: {error}")
    _write_tree(work / "early", recipe.EARLY_FILES, {})
    (work / "early/usr/sbin/policy-rc.d").chmod(0o755)
    key = (out / "id_ed25519.pub").read_text()
    _write_tree(work / "late", {**recipe.LATE_FILES, "root/.ssh/authorized_keys": key}, recipe.LINKS)
    say(f"building the {os_name} image: once, one to five minutes, about 700 MB in {work.parent}")
    command = [
        "mmdebstrap",
        "--variant=minbase",
        f"--mode={'root' if os.geteuid() == 0 else 'unshare'}",
        "--format=null",
        f"--include={','.join(recipe.PACKAGES)}",
        '--aptopt=APT::Install-Recommends "false"',
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        f"--essential-hook=sync-in {shlex.quote(str(work / 'early'))} /",
        f"--customize-hook=sync-in {shlex.quote(str(work / 'late'))} /",
        f"--customize-hook={recipe.FINISH_SCRIPT}",
        recipe.SUITES[os_name],
        "/dev/null",
    ]
    outputs = {
        "LAB_ROOT": out / "root.img",
        "LAB_KERNEL": out / "vmlinuz",
        "LAB_INITRD": out / "initrd.img",
        "LAB_LOADER": out / "grub",
    }
    with contextlib.ExitStack() as stack:
        descriptors = {}
        for variable, path in outputs.items():
            file = stack.enter_context(path.open("xb"))
            # The mapped user of the namespace writes here; no other user can enter the directory.
            path.chmod(0o666)
            # Out of the way: mmdebstrap makes apt write to descriptors of its own, which sh takes up to 9 only.
            high = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR)
            stack.callback(os.close, high)
            descriptors[variable] = high
        os.ftruncate(descriptors["LAB_ROOT"], recipe.IMAGE_SIZE)
        code = _run(command, descriptors, work / "build.log")
    for path in outputs.values():
        path.chmod(0o644)
    if code != 0:
        log = work.parent / "build-failed.log"
        shutil.move(work / "build.log", log)
        raise CannotJudge(
            f"`mmdebstrap` could not build the {os_name} image: {_last_error(log)}",
            f"it needs a Debian mirror (`apt-get update` must work); its output is in {log}",
        )


def _run(command: list[str], descriptors: dict[str, int], log: Path) -> int:
    environment = {**os.environ, **{name: str(number) for name, number in descriptors.items()}}
    environment["LAB_UID"] = str(os.getuid())
    # Debian keeps mke2fs and chroot out of an ordinary user's PATH.
    environment["PATH"] = environment.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    with log.open("wb") as output:
        # In its own session, mmdebstrap gets one signal from us, not a second one from the terminal while it
        # is removing its tree.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=tuple(descriptors.values()),
            # The mapped user could not come back to a home directory that is closed to others.
            cwd="/",
            start_new_session=True,
        )
        try:
            return process.wait(BUILD_TIMEOUT_SECONDS)
        except BaseException as error:
            _stop(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise CannotJudge(f"`mmdebstrap` took more than {BUILD_TIMEOUT_SECONDS} s") from None
            raise


def _stop(process: subprocess.Popen[bytes]) -> None:
    # To the whole session, because apt and dpkg under it do not hear of a signal to mmdebstrap alone; it then
    # unmounts and removes its own tree.
    with undisturbed():
        for number, seconds in ((signal.SIGINT, 60), (signal.SIGKILL, 10)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
                return


def _write_tree(root: Path, files: dict[str, str], links: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o644)
    for name, destination in links.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(destination)
    # The guest's own directories take over these modes: a umask of 077 would close its /etc.
    for directory in [root, *(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())]:
        directory.chmod(0o755)


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    # mmdebstrap ends with `E:` lines that only say that something failed; the cause is on the lines before.
    first = next((number for number, line in enumerate(lines) if line.startswith("E:")), len(lines))
    messages = [line for line in lines[:first] if not line.startswith(("I:", "W:", "Get:", "Fetched", "+"))]
    return (messages or lines or ["no output"])[-1]
