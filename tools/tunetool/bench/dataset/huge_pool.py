"""The kernel's pool of huge pages, resized for a while and put back, after SIGKILL too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunetool.measure.worker import Failed

POOL = Path("/proc/sys/vm/nr_hugepages")
_KEEPER = Path(__file__).with_name("huge_pool_keeper.py")


@contextmanager
def huge_pool(pages: int, setting: Path = POOL) -> Iterator[None]:
    """``pages`` huge pages in the pool, and afterwards as many as before. Raises ``Failed`` where the kernel has fewer.

    Another process writes the old value too: once this one is gone, however it ended.
    """
    before = setting.read_text().strip()
    with subprocess.Popen(
        [sys.executable, "-I", "-S", str(_KEEPER), str(setting), before],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ):
        # Leaving the block closes the keeper's stdin and waits for it.
        try:
            setting.write_text(f"{pages}\n")
            there = int(setting.read_text())
            if there < pages:
                raise Failed(
                    f"the kernel has room for {there} huge pages in its pool, not for {pages}",
                    "take fewer `--huge-pages`",
                )
            yield
        finally:
            setting.write_text(f"{before}\n")
