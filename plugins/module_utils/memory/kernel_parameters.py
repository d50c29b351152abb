"""Huge pages on the kernel's command line: renders and parses the words, and finds them in boot entries. Pure.

Kernel: Documentation/admin-guide/kernel-parameters.txt, ``hugepages=`` and ``hugepagesz=``.
"""

from __future__ import annotations

import re
from typing import Sequence

from ..machine.memory import HugePages

SINCE_PER_NODE = (5, 16)
"""``hugepages=<node>:<count>`` (kernel commit b5389086ad7b)."""
_HEADER = "# Written by tunetool (role host_memory); changes here are lost at its next run.\n"
_UNITS = (("G", 2**20), ("M", 2**10), ("K", 1))
_COUNT = re.compile(r"(?:(?P<node>[0-9]{1,9}):)?(?P<pages>[0-9]{1,18})")
_DROPIN = re.compile(r'^GRUB_CMDLINE_LINUX="\$GRUB_CMDLINE_LINUX (?P<words>[^"]*)"$', re.MULTILINE)
_LINUX = re.compile(r"^\s*linux(?:16|efi)?\s+(?P<words>\S.*)$", re.MULTILINE)
_ARGS = re.compile(r'^args="(?P<words>.*)"$', re.MULTILINE)
_NUMBER = re.compile(r"0[xX]([0-9a-fA-F]+)|(0[0-7]*)|([0-9]+)", re.ASCII)
_SUFFIXES = "KMGTPE"
_WRAP = 2**64
_DECIDING = 64


def parameters(pools: Sequence[HugePages]) -> list[str]:
    """The words that make the kernel reserve the gigantic pages of ``pools``, by size, then by node number."""
    words = []
    gigantic = [pool for pool in pools if pool.gigantic and pool.count]
    for size in sorted({pool.size_kib for pool in gigantic}):
        same = [pool for pool in gigantic if pool.size_kib == size]
        whole = [pool.count for pool in same if pool.numa_node is None]
        nodes = sorted((pool.numa_node, pool.count) for pool in same if pool.numa_node is not None)
        counts = str(sum(whole)) if whole else ",".join("%d:%d" % pair for pair in nodes)
        words += ["hugepagesz=%s" % _size_word(size), "hugepages=%s" % counts]
    return words


def _size_word(size_kib: int) -> str:
    return next("%d%s" % (size_kib // unit, letter) for letter, unit in _UNITS if size_kib % unit == 0)


def parse(words: Sequence[str]) -> list[HugePages]:
    """The pools in ``words``, as mm/hugetlb.c reads them. Pages of a default size that no word names are left out."""
    pools: list[HugePages] = []
    unsized: list[tuple[int, int | None]] = []
    size, seen = None, False
    for word in words:
        if word == "--":
            break
        name, _, value = word.partition("=")
        # A parameter's name has - or _, and its value may stand in quotes.
        name, value = name.replace("-", "_"), value.strip('"')
        if name in ("hugepagesz", "default_hugepagesz"):
            size, seen = _size_kib(value), True
            if name == "default_hugepagesz" and size is not None:
                pools += [HugePages(size, count, node) for count, node in unsized]
                unsized = []
        elif name == "hugepages":
            if size is not None:
                pools += [HugePages(size, count, node) for count, node in _counts(value)]
            elif not seen and not unsized:
                unsized = _counts(value)
            size = None
    return pools


def _size_kib(value: str) -> int | None:
    size = memory_size(value)
    return size // 1024 if size is not None and size >= 1024 and size % 1024 == 0 else None


def _counts(value: str) -> list[tuple[int, int | None]]:
    """Pages and the number of their node, or None: the counts are decimal, and what follows them does not count."""
    counts: list[tuple[int, int | None]] = []
    for part in value.split(","):
        match = _COUNT.match(part)
        if match is None or (match.group("node") is None and counts):
            break
        node = match.group("node")
        counts.append((int(match.group("pages")), None if node is None else int(node)))
        if node is None:
            break
    return counts


def carries(words: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether ``words`` contains ``wanted`` in one piece: a size belongs to the count that follows it."""
    return _start_of(words, wanted) is not None


def without(words: Sequence[str], ours: Sequence[str]) -> list[str]:
    """``words`` without the first occurrence of ``ours`` in one piece."""
    start = _start_of(words, ours)
    return list(words) if not ours or start is None else [*words[:start], *words[start + len(ours) :]]


def _start_of(words: Sequence[str], wanted: Sequence[str]) -> int | None:
    length = len(wanted)
    return next((at for at in range(len(words) - length + 1) if list(words[at : at + length]) == list(wanted)), None)


def foreign_pools(words: Sequence[str], ours: Sequence[Sequence[str]]) -> list[HugePages]:
    """Gigantic pools on a command line that are not ours; ``ours``: the words that may be from us."""
    for wanted in ours:
        words = without(words, wanted)
    return [pool for pool in parse(words) if pool.gigantic]


def render_dropin(words: Sequence[str]) -> str:
    """A file for /etc/default/grub.d, which grub-mkconfig reads after /etc/default/grub; empty for no words."""
    if not words:
        return ""
    return '%sGRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX %s"\n' % (_HEADER, " ".join(words))


def parse_dropin(text: str) -> list[str]:
    """The words of a file that ``render_dropin`` wrote; empty for any other file."""
    match = _DROPIN.search(text)
    return match.group("words").split() if match else []


def linux_lines(grub_cfg: str) -> list[list[str]]:
    """The command line of each Linux in a grub.cfg; other entries, such as memory testers, do not count."""
    lines = [match.group("words").split() for match in _LINUX.finditer(grub_cfg)]
    return [words[1:] for words in lines if "vmlinu" in words[0] or "/kernel" in words[0]]


def grubby_lines(info: str) -> list[list[str]]:
    """The command lines that ``grubby --info=ALL`` prints."""
    return [match.group("words").split() for match in _ARGS.finditer(info)]


def knows_nodes(release: str) -> bool:
    """Whether a kernel takes ``hugepages=<node>:<count>``."""
    match = re.match(r"^(\d+)\.(\d+)", release)
    return match is not None and (int(match.group(1)), int(match.group(2))) >= SINCE_PER_NODE


def leading_number(text: str) -> int | None:
    """The number at the start of ``text``, as ``simple_strtoull`` with base 0 takes it: 0x is hexadecimal, 0 octal.

    None without a digit. What follows does not count.
    """
    return _leading(text)[0]


def memory_size(text: str) -> int | None:
    """Bytes, as ``memparse`` (lib/cmdline.c) reads ``text``: one letter of K, M, G, T, P, E may follow, in either case.

    None without a digit. What follows does not count: `1GB` is `1G`.
    """
    number, rest = _leading(text)
    if number is None:
        return None
    power = _SUFFIXES.find(rest[:1].upper()) + 1 if rest else 0
    return (number << 10 * power) % _WRAP


def _leading(text: str) -> tuple[int | None, str]:
    match = _NUMBER.match(text)
    if match is None:
        return None, text
    digits, base = next((part, base) for part, base in zip(match.groups(), (16, 8, 10)) if part is not None)
    # The last 64 digits decide: that power of 8, 10 and 16 is a multiple of 2^64. Python converts no 5,000 digits.
    return int(digits[-_DECIDING:], base) % _WRAP, text[match.end() :]
