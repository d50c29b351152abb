"""Containers that stand in for nodes: the image, `up` and `down`, with podman or docker, for molecule/default.

    container.py test             `molecule test`, and no container left behind whatever happens
    container.py up NAME          start a container with systemd; build and import its image when there is none
    container.py down NAME        remove it, whether or not it is there

$TUNETOOL_CONTAINER_RUNTIME chooses podman or docker, $TUNETOOL_CONTAINER_OS debian12 or debian13.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import scenario

ROOT = Path(__file__).resolve().parents[2]
RUNTIMES = ("podman", "docker")
SUITES = {"debian12": "bookworm", "debian13": "trixie"}
PACKAGES = ("systemd", "systemd-sysv", "dbus", "udev", "kmod", "python3", "python3-apt", "iproute2", "procps")
"""Packages of a node before Ansible runs; the roles install everything else."""

OPTIONS = (
    '--aptopt=APT::Install-Recommends "false"',
    "--dpkgopt=path-exclude=/usr/share/man/*",
    "--dpkgopt=path-exclude=/usr/share/locale/*",
    "--dpkgopt=path-exclude=/usr/share/doc/*",
)
READY_SECONDS = 60
BUILD_SECONDS = 900
SBIN = ":/usr/local/sbin:/usr/sbin:/sbin"

COMPILERS = ("g++", "libaio-dev", "python3-dev")
"""What the role node_packages adds where DeepSpeed's ops are to be compiled."""

# Its own mounts may be remounted. Not privileged: /sys and /proc/sys stay read-only, so that neither huge pages nor
# sysctls of the machine that runs the tests can change.
COMMON = ("--cap-add=SYS_ADMIN", "--label=tunetool=test")
PODMAN = ("--systemd=always",)
DOCKER = (
    "--cgroupns=host",
    "--volume=/sys/fs/cgroup:/sys/fs/cgroup:rw",
    "--tmpfs=/run",
    "--tmpfs=/run/lock",
    "--security-opt=apparmor=unconfined",
)
# A root without CAP_SYS_RESOURCE may not raise the limits that podman asks for; crun refuses hybrid cgroups.
LOWER_LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096")
PODMAN_WAYS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    ((), ()),
    ((), LOWER_LIMITS),
    (("--runtime=runc",), LOWER_LIMITS),
)
"""Global options, and options of `run`, tried in this order. An ordinary machine needs none."""


def stop(message: str, hint: str, code: int = 3) -> NoReturn:
    print(f"error: {message}\nhint: {hint}", file=sys.stderr)
    raise SystemExit(code)


def call(argv: Sequence[str], seconds: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=seconds, stdin=subprocess.DEVNULL)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def find_runtime(wanted: str) -> str:
    """podman or docker, whichever answers; ``wanted`` alone when it is given. An installed client is no answer."""
    if wanted and wanted not in RUNTIMES:
        stop(f"`TUNETOOL_CONTAINER_RUNTIME={wanted}` is no container runtime", "set it to podman or docker", 2)
    reasons = []
    for name in [wanted] if wanted else RUNTIMES:
        if shutil.which(name) is None:
            reasons.append(f"`{name}` is not installed")
            continue
        done = call([name, "info"])
        if done.returncode == 0:
            return name
        reasons.append(f"`{name} info` failed: {last_line(done.stderr)}")
    stop("; ".join(reasons), "tools/dev/setup.sh --containers installs podman where apt-get is")


def fingerprint(system: str, packages: Sequence[str] = PACKAGES) -> str:
    """Hash of everything that determines the image's content."""
    return hashlib.sha256(repr((1, SUITES[system], tuple(packages), OPTIONS)).encode()).hexdigest()[:12]


@contextlib.contextmanager
def only_builder(cache: Path) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cache_directory() -> Path:
    """The directory of what is made once and outlives a checkout."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tunetool"


def ensure_image(runtime: str, system: str) -> str:
    """Name of the image of a node, or the user's own."""
    return os.environ.get("TUNETOOL_CONTAINER_IMAGE", "") or made_image(runtime, system, "test", PACKAGES)


def made_image(runtime: str, system: str, purpose: str, packages: Sequence[str]) -> str:
    """Name of an image in the runtime's own store, from the cached archive, built when there is none."""
    key = fingerprint(system, packages)
    image = f"tunetool-{purpose}:{system}-{key}"
    if call([runtime, "image", "inspect", image]).returncode == 0:
        return image
    cache = cache_directory() / ("containers" if purpose == "test" else f"containers-{purpose}")
    with only_builder(cache):
        archive = cache / f"{system}-{key}.tar"
        if not archive.exists():
            build(system, archive, packages)
        # `docker import` takes the same options; the start of the container passes the command.
        done = call([runtime, "import", str(archive), image], 300)
        if done.returncode:
            stop(f"`{runtime} import` failed: {last_line(done.stderr)}", f"look at {archive}, or remove it")
    return image


def build(system: str, archive: Path, packages: Sequence[str]) -> None:
    """Build the archive by mmdebstrap and rename it into place; older ones of this system are removed."""
    program = shutil.which("mmdebstrap")
    if program is None:
        stop(
            "`mmdebstrap` is not installed",
            "tools/dev/setup.sh --containers installs it; or name an image with systemd and Python 3 of your own in "
            "TUNETOOL_CONTAINER_IMAGE",
        )
    print(f"building the {system} image: once, half a minute to two, 220 MB in {archive.parent}", file=sys.stderr)
    unfinished = archive.with_suffix(".unfinished")
    mode = "root" if os.geteuid() == 0 else "unshare"
    command = [
        *(program, "--quiet", "--variant=minbase", f"--mode={mode}", "--format=tar"),
        *(f"--include={','.join(packages)}", *OPTIONS, SUITES[system], str(unfinished)),
    ]
    environment = {**os.environ, "PATH": os.environ.get("PATH", os.defpath) + SBIN}
    try:
        with subprocess.Popen(
            # A session of its own: it gets one signal from us, not another from the terminal while it cleans up.
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        ) as process:
            try:
                messages = process.communicate(timeout=BUILD_SECONDS)[1]
            except BaseException:
                # To the session, since apt under mmdebstrap does not hear of a signal to mmdebstrap alone.
                os.killpg(process.pid, signal.SIGINT)
                process.wait(60)
                raise
        if process.returncode:
            stop(
                f"`mmdebstrap` could not build the {system} image: {last_line(messages)}",
                "it needs a Debian mirror: does `apt-get update` work?",
            )
        for old in archive.parent.glob(f"{system}-*.tar"):
            old.unlink()
        unfinished.rename(archive)
    finally:
        unfinished.unlink(missing_ok=True)


def up(runtime: str, system: str, name: str) -> None:
    """Start the container and wait for its systemd. What was half started is removed again."""
    image = ensure_image(runtime, system)
    down(runtime, name)
    try:
        start(runtime, image, name)
        deadline = time.monotonic() + READY_SECONDS
        # `degraded` is a unit that a container cannot have. At first there is no bus to ask over.
        while (state := call([runtime, "exec", name, "systemctl", "is-system-running"])).stdout.strip() not in (
            "running",
            "degraded",
        ):
            if time.monotonic() > deadline:
                answer = last_line(state.stdout + state.stderr)
                stop(f"systemd in `{name}` says `{answer}` after {READY_SECONDS} s", f"look at `{runtime} info`")
            time.sleep(0.5)
    except BaseException:
        down(runtime, name)
        raise


def start(runtime: str, image: str, name: str, network: str = "host", command: Sequence[str] = ("/sbin/init",)) -> None:
    """Start the container. Its network is this machine's, for the package client; ``none``: its loopback alone."""
    error = ""
    for before, after in PODMAN_WAYS if runtime == "podman" else (((), ()),):
        options = PODMAN if runtime == "podman" else DOCKER
        run = [runtime, *before, "run", "--detach", f"--name={name}", f"--hostname={name}", f"--network={network}"]
        done = call([*run, *COMMON, *options, *after, image, *command])
        if done.returncode == 0:
            return
        error = error or last_line(done.stderr)
        down(runtime, name)
    stop(f"`{runtime} run` failed: {error}", f"does `{runtime} run --rm {image} true` work?")


def down(runtime: str, name: str) -> None:
    """Remove the container at once, without a clean shutdown."""
    at_once = ["--time=0"] if runtime == "podman" else []
    done = call([runtime, "rm", "--force", "--volumes", *at_once, name])
    if done.returncode and call([runtime, "inspect", name]).returncode == 0:
        stop(f"`{runtime} rm {name}` failed: {last_line(done.stderr)}", f"remove `{name}` by hand")


def test(runtime: str, system: str) -> int:
    """Molecule's exit status."""
    ensure_image(runtime, system)
    # Another checkout on this machine has containers of its own.
    name = f"tunetool-test-{system}-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:6]}"
    variables = {
        "TUNETOOL_CONTAINER_RUNTIME": runtime,
        "TUNETOOL_CONTAINER_OS": system,
        "TUNETOOL_CONTAINER_NAME": name,
    }
    return scenario.test("default", variables, lambda: down(runtime, name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["test", "up", "down"])
    parser.add_argument("name", nargs="?")
    options = parser.parse_args()
    if options.action != "test" and not options.name:
        parser.error("NAME is missing")
    system = os.environ.get("TUNETOOL_CONTAINER_OS") or "debian12"
    if system not in SUITES:
        stop(f"`TUNETOOL_CONTAINER_OS={system}` is not known", f"one of {', '.join(SUITES)}", 2)
    # SIGTERM, from a time box, must clean up as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    runtime = find_runtime(os.environ.get("TUNETOOL_CONTAINER_RUNTIME", ""))
    if options.action == "test":
        raise SystemExit(test(runtime, system))
    if options.action == "up":
        up(runtime, system, options.name)
    else:
        down(runtime, options.name)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except subprocess.TimeoutExpired as error:
        stop(f"`{shlex.join(error.cmd)}` did not end within {error.timeout:.0f} s", "is the machine overloaded?")
