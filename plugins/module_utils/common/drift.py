"""Drift: differences of a built node from what is asked, with a name, the expected and the found value.

A node is built when its manifest can be read. Creation is no drift: on a node without one nothing is reported.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass, replace
from typing import Any, Callable, Iterator, Mapping, Sequence, TypeVar

from .files import lines, sync_directory
from .manifest import MANIFEST_PATH, ManifestError, built_members, load
from .refusal import Expected, Refusal, on_one_line

WAITS = "it is mended by the next run that nothing else stops"


@dataclass(frozen=True)
class Difference:
    """One difference. ``mended``: it is changed now, or would be without check mode."""

    name: str
    expected: str
    found: str
    mended: bool = True
    hint: str = ""
    """What the owner can do about a difference that remains."""

    def __str__(self) -> str:
        text = "`%s`: expected %s, found %s" % (self.name, self.expected, self.found)
        return on_one_line("%s. hint: %s" % (text, self.hint) if self.hint else text)


class Drifted(Expected):
    """A difference cannot be mended without risk to the data, so nothing was changed."""

    def __init__(self, differences: Sequence[Difference]) -> None:
        self.differences = left_alone(differences)
        super().__init__(message(self.differences))


def left_alone(differences: Sequence[Difference]) -> list[Difference]:
    """The difference in a run that changes nothing: it is mended later."""
    return [
        replace(difference, mended=False, hint=WAITS) if difference.mended else difference for difference in differences
    ]


def message(differences: Sequence[Difference]) -> str:
    """Differences of a run that ends here, a line each."""
    return "the node is not as it was built and asked for:\n" + "\n".join(map(str, differences))


def as_results(differences: Sequence[Difference]) -> list[dict[str, Any]]:
    """The differences as modules return them."""
    return [asdict(difference) for difference in differences]


def built_manifest(path: str = MANIFEST_PATH) -> dict[str, Any] | None:
    """The manifest; None if no array was built on the node, or its manifest cannot be read."""
    document = known_manifest(path)
    return document if document is not None and built_members(document) else None


def known_manifest(path: str = MANIFEST_PATH) -> dict[str, Any] | None:
    """The manifest, whether the volume was built or is its owner's; None if there is none that can be read."""
    try:
        return load(path)
    except (FileNotFoundError, ManifestError):
        return None


def forget(path: str = MANIFEST_PATH) -> None:
    """Remove the manifest before its array is made again: after an interruption a run starts from what is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
        sync_directory(os.path.dirname(path))


def diff_entry(what: str, before: str, after: str) -> dict[str, str]:
    """A difference as Ansible's --diff shows it."""
    return {"before_header": what, "after_header": what, "before": before, "after": after}


class Ledger:
    """Collects a job's changes: before and after for the diff, and on a built node each difference by name."""

    def __init__(
        self, manifest: Mapping[str, Any] | None, acting: bool, begins: Callable[[], None] = lambda: None
    ) -> None:
        """``begins`` is called before each change."""
        self.manifest = manifest
        self.acting = acting
        self._begins = begins
        self.volume = ""
        """Its name where the work is about one of several, for the names of differences."""
        self.diff: list[dict[str, str]] = []
        self.differences: list[Difference] = []
        self.warnings: list[str] = []

    @contextlib.contextmanager
    def about(self, volume: str, manifest: Mapping[str, Any] | None) -> Iterator[None]:
        """What is done inside is about one of several volumes, with the manifest of a node that has it alone."""
        before = self.volume, self.manifest
        self.volume, self.manifest = volume, manifest
        yield
        self.volume, self.manifest = before

    def _name(self, name: str) -> str:
        return "%s[%s]" % (name, self.volume) if self.volume else name

    def note(self, what: str, before: str, after: str) -> bool:
        """Record a change for the diff only. Returns whether to make it now."""
        if before == after:
            return False
        self.diff.append(diff_entry(what, before, after))
        if self.acting:
            self._begins()
        return self.acting

    def differs(self, name: str, expected: str, found: str, what: str, before: str, after: str) -> bool:
        """Record a difference that can be mended. Returns whether to mend it now."""
        if before != after and self.manifest is not None:
            self.differences.append(Difference(self._name(name), expected, found))
        return self.note(what, before, after)

    def file_differs(self, name: str, path: str, before: str, after: str) -> bool:
        """``differs`` for a file: expected and found are the differing lines."""
        return self.differs(name, lines_only_in(after, before), lines_only_in(before, after), path, before, after)

    def cannot(self, name: str, expected: str, found: str, hint: str, refusal: str) -> None:
        """A difference that cannot be mended: collected on a built node, ``refusal`` at once on any other."""
        if self.manifest is None:
            raise Refusal(refusal)
        self.differences.append(Difference(self._name(name), expected, found, mended=False, hint=hint))

    def give_up(self, name: str, found: str, hint: str, refusal: str) -> None:
        """Record that a change failed: the difference remains, with the present value."""
        if self.manifest is None:
            raise Refusal(refusal)
        self.differences = [
            replace(difference, found=found, mended=False, hint=hint)
            if difference.name == self._name(name)
            else difference
            for difference in self.differences
        ]

    def later(self, name: str, found: str, hint: str) -> None:
        """Record a setting that takes effect at the next boot. It is reported, and is not a failure."""
        self.differences = [
            replace(difference, found=found, hint=hint) if difference.name == self._name(name) else difference
            for difference in self.differences
        ]

    @property
    def left(self) -> list[Difference]:
        """Differences that remain."""
        return [difference for difference in self.differences if not difference.mended]


class Collector(Ledger):
    """A ledger that only looks, and collects every refusal where the others raise the first."""

    def __init__(self) -> None:
        super().__init__(None, acting=False)
        self.refusals: list[str] = []

    def cannot(self, name: str, expected: str, found: str, hint: str, refusal: str) -> None:
        """Collect the refusal."""
        self.refusals.append(refusal)


class Job:
    """Work on the machine under ``root``; what it finds and changes goes into ``ledger``."""

    def __init__(self, ledger: Ledger, root: str = "/") -> None:
        self.ledger = ledger
        self.root = root

    def _path(self, path: str) -> str:
        return os.path.join(self.root, path.lstrip("/"))


def lines_only_in(text: str, reference: str) -> str:
    """The lines of ``text`` that ``reference`` lacks, comments left out, as one line."""
    known = {line.rstrip("\r\n") for line in lines(reference)}
    mine = [line.rstrip("\r\n") for line in lines(text)]
    return "; ".join("`%s`" % line for line in mine if line and line not in known and line[0] != "#") or "nothing"


Result = TypeVar("Result")


def settle(
    work: Callable[[Ledger], Result],
    manifest: Mapping[str, Any] | None,
    check_mode: bool,
    begins: Callable[[], None] = lambda: None,
) -> tuple[Result, Ledger]:
    """Let ``work`` compare everything, then let it act, if every difference can be mended.

    ``begins`` is called before each change.

    Raises ``Drifted`` with every difference, and ``Refusal`` on a node that is not built; nothing was changed then.
    """
    looking = Ledger(manifest, acting=False)
    result = work(looking)
    if looking.left:
        raise Drifted(looking.differences)
    if check_mode or not looking.diff:
        return result, looking
    acting = Ledger(manifest, True, begins)
    result = work(acting)
    acting.warnings = list(dict.fromkeys(looking.warnings + acting.warnings))
    return result, acting
