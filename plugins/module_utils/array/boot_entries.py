"""The images that GRUB's configuration names for the next boot, and whether they are there. Only reads files.

Two entries count: the default one, and that of the running kernel, which a person picks when the other one fails. Both
forms are read: `menuentry` in grub.cfg, and the files of the Boot Loader Specification, which `blscfg` puts in.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
from dataclasses import dataclass, field
from typing import Iterator, Optional, Sequence

from ..common.files import exact_text, read_text, whole_number

_DIRECTORIES = ("boot/grub", "boot/grub2")
_LOADER_ENTRIES = "boot/loader/entries/*.conf"
_OPENS = re.compile(r"^\s*(?P<kind>menuentry|submenu)\s(?P<rest>.*)\{\s*$")
_DEFAULT = re.compile(r"^\s*set\s+default=(?P<value>\S.*)$", re.MULTILINE)
_SAVED = re.compile(r"^saved_entry=(?P<value>.*)$", re.MULTILINE)
_FILES = re.compile(r"^\s*(?P<kind>linux|initrd)(?:16|efi)?\s+(?P<words>\S.*)$")
_KERNEL = re.compile(r"^(?:vmlinu[xz]|kernel|linux)-(?P<version>.+)$")


@dataclass
class Item:
    """A line of GRUB's menu: an entry, or a menu of them."""

    title: str = ""
    id: str = ""
    kernel: str = ""
    """Path of the kernel, as the boot loader sees it."""
    initrds: list[str] = field(default_factory=list)
    items: list["Item"] = field(default_factory=list)

    @property
    def version(self) -> str:
        """The kernel's; empty if its file's name has none."""
        match = _KERNEL.match(os.path.basename(self.kernel))
        return match.group("version") if match else ""


@dataclass(frozen=True)
class Gone:
    """An image that an entry names and that is not there."""

    path: str
    version: str
    """The kernel's; empty if unknown."""
    entry: str
    """The entry, in words."""


def gone_images(root: str = "/") -> list[Gone]:
    """The images that the next boot would not find, each once. None where there is no GRUB, or nobody may read it."""
    menu = read_menu(root)
    gone: dict[str, Gone] = {}
    default = default_entry(menu, _default(root))
    running = read_text(os.path.join(root, "proc/sys/kernel/osrelease")) or ""
    entries = [("the default entry of GRUB", default)] if default is not None else []
    entries += [("the entry of the running kernel", item) for item in _entries(menu) if running == item.version != ""]
    for words, entry in entries:
        for path in entry.initrds:
            if not _exists(path, root):
                gone.setdefault(path, Gone(path, entry.version, words))
    return list(gone.values())


def read_menu(root: str = "/") -> list[Item]:
    """GRUB's menu."""
    text = _grub_file("grub.cfg", root)
    named = [_loader_entry(path) for path in glob.glob(os.path.join(root, _LOADER_ENTRIES))]
    # GRUB shows the newest version first.
    named.sort(key=lambda item: _order(item.id), reverse=True)
    return [*(named if re.search(r"^\s*blscfg\b", text, re.MULTILINE) else []), *items_of(text)]


def items_of(grub_cfg: str) -> list[Item]:
    """The menu in a grub.cfg."""
    top = Item()
    open_blocks: list[Optional[Item]] = [top]
    for line in grub_cfg.split("\n"):
        opens = _OPENS.match(line)
        if opens:
            above = next(block for block in reversed(open_blocks) if block is not None)
            above.items.append(_item(opens.group("rest")))
            open_blocks.append(above.items[-1])
        elif line.rstrip().endswith("{"):
            open_blocks.append(None)
        elif line.strip() == "}" and len(open_blocks) > 1:
            open_blocks.pop()
        elif open_blocks[-1] is not None:
            _take(open_blocks[-1], line)
    return top.items


def default_entry(menu: Sequence[Item], default: str) -> Optional[Item]:
    """The entry that ``default`` chooses, by number, title or id, in menus by `>`; the first where it chooses none."""
    items, chosen = menu, None
    for word in default.replace(">>", "\0").split(">"):
        name = word.replace("\0", ">").strip()
        number = whole_number(name)
        chosen = items[number] if number is not None and 0 <= number < len(items) else None
        chosen = chosen or next((item for item in items if name in (item.id, item.title)), None)
        if chosen is None:
            break
        items = chosen.items
    return next(_entries([chosen]), None) if chosen is not None else next(_entries(menu[:1]), None)


def _item(rest: str) -> Item:
    try:
        words = shlex.split(rest)
    except ValueError:
        words = rest.split()
    marks = [at for at, word in enumerate(words[:-1]) if word in ("$menuentry_id_option", "--id")]
    return Item(words[0] if words else "", words[marks[-1] + 1] if marks else "")


def _take(item: Item, line: str) -> None:
    """Take what a line says of the entry's files. A word may begin with the device, as `($root)`."""
    match = _FILES.match(line)
    if match is None:
        return
    paths = [re.sub(r"^\([^)]*\)", "", word) for word in match.group("words").split()]
    if match.group("kind") == "linux":
        item.kernel = paths[0]
    else:
        item.initrds += [path for path in paths if path.startswith("/")]


def _loader_entry(path: str) -> Item:
    item = Item(id=os.path.basename(path)[: -len(".conf")])
    for line in exact_text(path).split("\n"):
        word, _, rest = line.strip().partition(" ")
        if word == "title":
            item.title = rest.strip()
        _take(item, line)
    return item


def _order(name: str) -> list[tuple[int, int, str]]:
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in re.findall(r"\d+|[^\d._-]+", name)]


def _entries(items: Sequence[Item]) -> Iterator[Item]:
    for item in items:
        if item.kernel:
            yield item
        yield from _entries(item.items)


def _default(root: str) -> str:
    """What GRUB's configuration sets as the default; `0` where that is nothing."""
    # `next_entry` counts for one boot, and is set first.
    values = [match.group("value").strip("\"' ") for match in _DEFAULT.finditer(_grub_file("grub.cfg", root))]
    value = next((value for value in values if "next_entry" not in value), "0")
    if "saved_entry" in value:
        saved = _SAVED.search(_grub_file("grubenv", root))
        value = saved.group("value") if saved else ""
    return value or "0"


def _grub_file(name: str, root: str) -> str:
    return next(filter(None, (exact_text(os.path.join(root, place, name)) for place in _DIRECTORIES)), "")


def _exists(path: str, root: str) -> bool:
    """The boot loader's paths begin at the file system of /boot, which may be the root's, or a subvolume of it."""
    places = (path.lstrip("/"), os.path.join("boot", path.lstrip("/")), os.path.join("boot", os.path.basename(path)))
    return any(os.path.exists(os.path.join(root, place)) for place in places)
