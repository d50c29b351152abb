"""mdadm.conf: reads its ARRAY lines as mdadm does; sets or removes ours without changing any other byte."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..common.files import lines, with_line

_WORD = re.compile(r"""(?:"[^"\n]*"?|'[^'\n]*'?|[^ \t"'\n])+""")
_QUOTE = re.compile(r"""["']""")


@dataclass(frozen=True)
class ArrayLine:
    """One ARRAY line with its continuation lines, which begin with a blank (mdadm.conf(5))."""

    words: tuple[str, ...]
    """The words after the keyword, without quotes."""
    numbers: tuple[int, ...]
    """The lines of the file, from 0, that hold its words."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The names that it gives the array, in full."""
        named = [word for word in self.words if word.startswith("/") or "=" not in word]
        return tuple(name if name.startswith(("/", "<")) else "/dev/md/" + name for name in named)

    @property
    def uuids(self) -> tuple[str, ...]:
        """The UUIDs that it looks for, as bare digits."""
        tags = [word.partition("=") for word in self.words if not word.startswith("/")]
        return tuple(_digits(value) for name, _, value in tags if name.lower() == "uuid")

    def names(self, uuid: str) -> bool:
        """Whether it is about the array ``uuid``, in any notation of the UUID."""
        return bool(_digits(uuid)) and _digits(uuid) in self.uuids

    def __str__(self) -> str:
        return " ".join(["ARRAY", *self.words])


def _digits(uuid: str) -> str:
    return re.sub(r"[^0-9a-f]", "", uuid.lower())


def array_lines(text: str) -> list[ArrayLine]:
    """The ARRAY lines of an mdadm.conf."""
    arrays: list[tuple[list[str], list[int]]] = []
    for number, line in enumerate(lines(text)):
        words = _words(line) or ([""] if line[0] == "\r" else [])  # to mdadm, that is a word
        if not words:
            continue  # neither a blank line nor a comment ends a line that goes on after it
        if line[0] in " \t" and arrays:
            arrays[-1][0].extend(words)
            arrays[-1][1].append(number)
        else:
            arrays.append((words, [number]))
    return [ArrayLine(tuple(words[1:]), tuple(numbers)) for words, numbers in arrays if _is_array(words[0])]


def _words(line: str) -> list[str]:
    words = []
    for word in _WORD.findall(line.rstrip("\r\n")):
        if word.startswith("#"):
            break
        words.append(_QUOTE.sub("", word))
    return words


def _is_array(keyword: str) -> bool:
    # mdadm takes any beginning of three letters or more.
    return len(keyword) > 2 and "array".startswith(keyword.lower())


def line_for(name: str, uuid: str) -> str:
    """The line by which the array has its name after every boot."""
    return "ARRAY /dev/md/%s metadata=1.2 UUID=%s" % (name, uuid)


def conf_with_array(text: str, name: str, uuid: str) -> str:
    """mdadm.conf with exactly one line for this array, and all other lines unchanged.

    Lines that name the same UUID, or the same ``/dev/md/NAME``, are replaced: two of them are how an array comes
    back under another name.
    """
    ours = [entry for entry in array_lines(text) if entry.names(uuid) or "/dev/md/" + name in entry.devices]
    if not ours:
        return _added(text, line_for(name, uuid))
    whole = lines(text)
    line_number = ours[0].numbers[0]
    end = whole[line_number][len(whole[line_number].rstrip("\r\n")) :]
    doomed = {number for entry in ours for number in entry.numbers} - {line_number}
    whole[line_number] = line_for(name, uuid) + end
    return "".join(line for number, line in enumerate(whole) if number not in doomed)


def _added(text: str, line: str) -> str:
    whole = lines(text)
    begun = [number for number, each in enumerate(whole) if each[0] not in " \t\n#"]
    if begun:
        # A continuation of the last line must not continue ours.
        return with_line(text, line, begun[-1])
    if text and not text.endswith("\n") and any(map(_words, whole)):
        # Every line is indented, so only the end is left for ours: the one case in which a line end stays behind.
        text += "\n"
    return with_line(text, line, 0)


def conf_without_array(text: str, uuid: str) -> str:
    """mdadm.conf without the ARRAY lines of this UUID, all other lines as they are."""
    doomed = {number for entry in array_lines(text) if entry.names(uuid) for number in entry.numbers}
    return "".join(line for number, line in enumerate(lines(text)) if number not in doomed)
