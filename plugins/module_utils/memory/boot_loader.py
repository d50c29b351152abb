"""The boot loader, which sets the kernel's command line: GRUB as on Debian and Ubuntu, or grubby.

A boot configuration is never left half written: a new one is checked and then renamed into place, and if the tools fail
or make something else, the former one is restored.
"""

from __future__ import annotations

import contextlib
import os
from typing import Protocol, Sequence

from ..common.commands import CommandError, run
from ..common.files import content, replace_file
from ..common.refusal import Refusal
from .kernel_parameters import carries, grubby_lines, linux_lines, parse_dropin, render_dropin, without

DROPIN_PATH = "/etc/default/grub.d/60-tunetool-hugepages.cfg"
GRUB_CFG = "/boot/grub/grub.cfg"
MADE = "/boot/grub/.tunetool-grub.cfg"
_MKCONFIG = "/usr/sbin/grub-mkconfig"
_GRUBBY = ("/usr/sbin/grubby", "/sbin/grubby")
_SECONDS = 600


class BootLoader(Protocol):
    """The interface of a boot loader."""

    where: str
    """The place where a person can check it."""

    def entries(self) -> list[list[str]]:
        """The command line of every kernel that can be booted."""

    def ours(self) -> list[str]:
        """The words that an earlier run set, according to the boot loader's own files."""

    def keeps(self, words: Sequence[str]) -> bool:
        """Whether its source has exactly ``words`` of ours, so that they survive the installation of a kernel."""

    def put(self, words: Sequence[str], before: Sequence[str]) -> None:
        """Replace our words ``before`` by ``words``. Raises ``Refusal`` after restoring the old state."""


def find(root: str = "/") -> BootLoader | None:
    """The boot loader of the machine under ``root``; None if it is not a known one."""
    if any(os.path.isfile(os.path.join(root, path.lstrip("/"))) for path in _GRUBBY):
        return Grubby()
    # Reading /etc/default/grub.d is Debian's own addition to grub-mkconfig.
    if "default/grub.d" in content(os.path.join(root, _MKCONFIG.lstrip("/"))) and os.path.isfile(
        os.path.join(root, GRUB_CFG.lstrip("/"))
    ):
        return Grub(root)
    return None


class Grub:
    """GRUB: our own file in /etc/default/grub.d, and a grub.cfg made from it."""

    where = DROPIN_PATH

    def __init__(self, root: str = "/") -> None:
        self._root = root

    def _path(self, path: str) -> str:
        return os.path.join(self._root, path.lstrip("/"))

    def entries(self) -> list[list[str]]:
        """The command lines in grub.cfg."""
        return linux_lines(content(self._path(GRUB_CFG)))

    def ours(self) -> list[str]:
        """The words in our file."""
        return parse_dropin(content(self._path(DROPIN_PATH)))

    def keeps(self, words: Sequence[str]) -> bool:
        """Whether our file has the words."""
        return self.ours() == list(words)

    def put(self, words: Sequence[str], before: Sequence[str]) -> None:
        """Write or remove our file, then make grub.cfg again."""
        old = content(self._path(DROPIN_PATH))
        try:
            self._write(render_dropin(words))
            made = self._make()
            _check(
                linux_lines(made), words, [word for word in (before, parse_dropin(old)) if list(word) != list(words)]
            )
            # grub-mkconfig itself overwrites the live file: a power loss would leave a node without kernels.
            replace_file(self._path(GRUB_CFG), made)
        except (CommandError, Refusal, OSError) as error:
            self._write(old)
            raise Refusal(
                "the boot configuration could not be made: %s. hint: `%s` is as it was before; run `update-grub` by "
                "hand to see more" % (error, DROPIN_PATH)
            ) from error
        finally:
            for leftover in (MADE, MADE + ".new"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(leftover))

    def _write(self, text: str) -> None:
        if text:
            replace_file(self._path(DROPIN_PATH), text)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(DROPIN_PATH))

    def _make(self) -> str:
        run(["grub-mkconfig", "-o", self._path(MADE)], timeout=_SECONDS)
        return content(self._path(MADE))


class Grubby:
    """grubby, Red Hat's tool: edits the entries of every installed kernel, and what later kernels inherit."""

    where = "grubby --info=ALL"

    def entries(self) -> list[list[str]]:
        """The command lines that grubby prints."""
        return grubby_lines(run(["grubby", "--info=ALL"]).stdout)

    def ours(self) -> list[str]:
        """Empty: the entries do not show who set a word."""
        return []

    def keeps(self, words: Sequence[str]) -> bool:
        """Whether all entries, which are its source, have the words."""
        return True

    def put(self, words: Sequence[str], before: Sequence[str]) -> None:
        """Remove the old words, add the new ones, and read back the entries."""
        entries = self.entries()
        # grubby finds a word by its name, so it would overwrite another pool's `hugepages=`.
        for entry in entries:
            strange = [word for word in without(entry, before) if word.partition("=")[0] in ("hugepages", "hugepagesz")]
            if words and strange and not carries(entry, words):
                raise Refusal(
                    "`%s` is on the kernel's command line, and grubby cannot keep two pools apart. hint: "
                    "`grubby --update-kernel=ALL --remove-args='%s'`, and ask for that pool in "
                    "`host_memory_hugepages`" % (" ".join(strange), " ".join(strange))
                )
        try:
            self._update(words, before)
            _check(self.entries(), words, [before] if list(before) != list(words) else [])
        except (CommandError, Refusal) as error:
            try:
                self._update(before if any(carries(entry, before) for entry in entries) else (), words)
            except CommandError as again:
                raise Refusal(
                    "the boot configuration could not be changed: %s. hint: what was there before could not be put "
                    "back (%s): look at `grubby --info=ALL` before the node reboots" % (error, again)
                ) from error
            raise Refusal(
                "the boot configuration could not be changed: %s. hint: what was there before was put back; look at "
                "`grubby --info=ALL`" % error
            ) from error

    @staticmethod
    def _update(words: Sequence[str], before: Sequence[str]) -> None:
        if before:
            run(["grubby", "--update-kernel=ALL", "--remove-args=%s" % " ".join(before)], timeout=_SECONDS)
        if words:
            run(["grubby", "--update-kernel=ALL", "--args=%s" % " ".join(words)], timeout=_SECONDS)


def _check(entries: Sequence[Sequence[str]], words: Sequence[str], gone: Sequence[Sequence[str]]) -> None:
    if not entries:
        raise Refusal("it would have no kernel")
    for entry in entries:
        if words and not carries(entry, words):
            raise Refusal("`%s` is missing from `%s`" % (" ".join(words), " ".join(entry)))
        for absent in gone:
            if absent and carries(entry, absent):
                raise Refusal("`%s` is still in `%s`" % (" ".join(absent), " ".join(entry)))
