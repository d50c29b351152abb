"""Shows that a clone works on a machine that has nothing: `make setup && make check` of what is committed.

    fresh.py             in a Debian 12 container with nothing but git, make, python3, python3-venv and ca-certificates;
                         --skipped FILE: list there which tests a container cannot run
    fresh.py --node      in a virtual node of the lab, which gets git, make and python3-venv and nothing else

Package clients there are set up as they are here: pip's settings and the folders that they name, apt's proxies and
sources, certificates. What they fetch, DeepSpeed's compiled op and what mypy has analysed stay in a cache for the next
time.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import container
import fresh_node
import settings

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "debian12"
PACKAGES = ("git", "make", "python3", "python3-venv", "ca-certificates")
"""The packages that the README requires."""
STEPS = """
set -euo pipefail
git -c safe.directory='*' clone --quiet /mnt/clone /root/tunetool
cd /root/tunetool
make setup
make check
"""
PREPARE = """
update-ca-certificates >/dev/null 2>&1
cp /mnt/settings/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
cp -r /mnt/settings/apt/. /etc/apt/
mkdir -p /var/cache/apt/archives/partial
"""


def clone(folder: Path) -> Path:
    """A clone of what is committed. Prints a note if the working tree has uncommitted changes."""
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    if changed.stdout.strip():
        print("what is not committed is left out", file=sys.stderr)
    made = folder / "clone"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", str(made)], check=True)
    return made


def home_cache() -> Path:
    """The container's ~/.cache, one for each lock file; older ones are removed."""
    inputs = b"".join((ROOT / name).read_bytes() for name in ("constraints.txt", "pyproject.toml"))
    key = hashlib.sha256(inputs + container.fingerprint(SYSTEM, PACKAGES).encode()).hexdigest()[:12]
    caches = container.cache_directory() / "fresh"
    for old in caches.glob("home-*"):
        if old.name != f"home-{key}":
            shutil.rmtree(old, ignore_errors=True)
    for part in ("cache", "apt"):
        (caches / f"home-{key}" / part).mkdir(parents=True, exist_ok=True)
    return caches / f"home-{key}"


def way_to_run(runtime: str, image: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The first arguments, before and after `run`, with which this runtime starts a container here."""
    error = ""
    for before, after in container.PODMAN_WAYS if runtime == "podman" else (((), ()),):
        done = container.call([runtime, *before, "run", "--rm", "--network=host", *after, image, "true"])
        if done.returncode == 0:
            return before, after
        error = error or container.last_line(done.stderr)
    return container.stop(f"`{runtime} run` failed: {error}", f"look at `{runtime} info`")


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Wait for other runs: two at a time would write into one cache."""
    with container.only_builder(container.cache_directory() / "fresh"):
        yield


def in_a_container(skipped: Path | None) -> int:
    """Exit status of `make setup && make check` there; the node ids of the tests that were skipped go to a file."""
    runtime = container.find_runtime(os.environ.get("TUNETOOL_CONTAINER_RUNTIME", ""))
    image = container.made_image(runtime, SYSTEM, "fresh", PACKAGES)
    before, after = way_to_run(runtime, image)
    name = f"tunetool-fresh-{secrets.token_hex(4)}"
    with only_one(), tempfile.TemporaryDirectory(prefix="tunetool-fresh-") as folder:
        directory, cache = Path(folder), home_cache()
        clone(directory)
        (directory / "skipped").mkdir()
        settings.write(directory / "settings", container.SUITES[SYSTEM])
        mounts = [
            f"{directory / 'clone'}:/mnt/clone:ro",
            f"{directory / 'settings'}:/mnt/settings:ro",
            f"{directory / 'skipped'}:/mnt/skipped",
            f"{cache / 'cache'}:/root/.cache",
            f"{cache / 'apt'}:/var/cache/apt/archives",
            *(f"{path}:{inside}:ro" for path, inside in settings.mounts()),
        ]
        command = [
            *(runtime, *before, "run", "--rm", "--interactive", "--network=host", "--label=tunetool=test", *after),
            f"--name={name}",
            *(f"--volume={mount}" for mount in mounts),
            *(f"--env={key}={value}" for key, value in settings.environment().items()),
            "--env=TUNETOOL_TESTS_SKIPPED_LIST=/mnt/skipped/tests",
            # mypy looks at the content of a file whose time has changed, so a new clone needs no new analysis.
            "--env=MYPY_CACHE_DIR=/root/.cache/mypy",
            *(image, "bash", "-s"),
        ]
        try:
            status = subprocess.run(command, input=PREPARE + STEPS, text=True, check=False).returncode
            if skipped and status == 0:
                tests = directory / "skipped/tests"
                lines = tests.read_text().splitlines() if tests.exists() else []
                skipped.write_text("".join(f"{test}\n" for test in sorted(set(lines))))
            return status
        finally:
            container.down(runtime, name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--node", action="store_true", help="in a virtual node of the lab")
    parser.add_argument("--skipped", type=Path, metavar="FILE", help="where to list the tests that a container skips")
    options = parser.parse_args()
    # SIGTERM, from a time box, must clean up as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    if not options.node:
        return in_a_container(options.skipped)
    with tempfile.TemporaryDirectory(prefix="tunetool-fresh-") as folder:
        clone(Path(folder))
        return fresh_node.in_a_node(Path(folder), container.SUITES[SYSTEM])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
