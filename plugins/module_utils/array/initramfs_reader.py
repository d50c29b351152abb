"""One file out of an initramfs, without unpacking the rest.

An image is one cpio archive after the other, the first of them often uncompressed (microcode), the last one mostly
compressed (kernel: Documentation/driver-api/early-userspace/buffer-format.rst). Both initramfs-tools and dracut sort
their archive by name, so that what lies in ``etc`` is read after a few kilobytes, and the rest never is.
"""

from __future__ import annotations

import bz2
import lzma
import os
import re
import shutil
import stat
import subprocess
import zlib
from dataclasses import dataclass
from io import FileIO
from typing import Any, Callable, Generator, Optional, Sequence

_PIECE = 1 << 18
_HEADER = 110
_NAME_MAX = 4096
_FILE_MAX = 1 << 20
"""No mdadm.conf is larger; a header that says so is damaged."""
_CPIO = re.compile(rb"0707(?:01|02)[0-9A-Fa-f]{104}")
_MDADM = re.compile(r"(?:usr/)?s?bin/mdadm")
_END = "TRAILER!!!"

_LIBRARIES: dict[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": lambda: zlib.decompressobj(31),
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ": lzma.LZMADecompressor,
    b"\x5d\0\0": lzma.LZMADecompressor,
}
_PROGRAMS = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x02\x21\x4c\x18": "lz4",
    b"\x04\x22\x4d\x18": "lz4",
    b"\x89LZO": "lzop",
}
"""The programs that wrote such an image, by the first bytes of what they write."""


class Damaged(Exception):
    """The image ends too early, or its bytes make no sense: the kernel could not use it either."""


class Unreadable(Exception):
    """The image cannot be judged from here. The message says why."""


@dataclass(frozen=True)
class Carried:
    """The parts of an image that concern arrays."""

    conf: Optional[bytes]
    """The image's mdadm.conf; None without one."""
    mdadm: bool = True
    """Whether the image has the program that assembles arrays; not checked if it has an mdadm.conf."""


def read_carried(path: str, names: Sequence[str]) -> Carried:
    """The first of the files ``names`` (as ``etc/mdadm.conf``) in the image. Raises ``Damaged``, ``Unreadable``."""
    try:
        with open(path, "rb", buffering=0, opener=_opened) as image:
            if not stat.S_ISREG(os.fstat(image.fileno()).st_mode):
                raise Unreadable("it is no regular file")
            return _read(image, names)
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from None


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO would wait for its writer


def _read(image: FileIO, names: Sequence[str]) -> Carried:
    plain = _Walk(_Source(image.read, image.seek), names)
    rest = plain.walk()
    if plain.content is not None or not rest:
        return plain.carried()
    image.seek(plain.source.position)
    pieces = _unpacked(image, rest)
    try:
        packed = _Walk(_Source(lambda _: next(pieces, b"")), names)
        packed.walk()
    finally:
        pieces.close()
    files = packed.carried()
    return Carried(files.conf, files.mdadm or plain.mdadm)


class _Source:
    """Bytes in order, with a look ahead."""

    def __init__(self, read: Callable[[int], Optional[bytes]], seek: Optional[Callable[[int], int]] = None) -> None:
        self._read = read
        self._seek = seek
        self._held = b""
        self._at = 0
        self.position = 0
        """Position of the next byte."""

    def peek(self, count: int) -> bytes:
        """The next bytes, left where they are; fewer at the end."""
        while len(self._held) - self._at < count:
            piece = self._read(_PIECE)
            if not piece:
                break
            self._held, self._at = self._held[self._at :] + piece, 0
        return self._held[self._at : self._at + count]

    def take(self, count: int) -> bytes:
        """The next bytes. Raises ``Damaged`` at the end."""
        piece = self.peek(count)
        self._at += len(piece)
        self.position += len(piece)
        if len(piece) < count:
            raise Damaged("it is cut off after %d bytes" % self.position)
        return piece

    def skip(self, count: int) -> None:
        """Pass over bytes, without reading them where the image itself is at hand."""
        if self._seek is not None and count > len(self._held) - self._at:
            self.position += count
            self._held, self._at = b"", 0
            self._seek(self.position)
            return
        while count > 0:
            count -= len(self.take(min(count, _PIECE)))

    def skip_padding(self) -> None:
        """Pass over the zeros between archives, which begin at a multiple of four."""
        while self.peek(1) == b"\0":
            piece = self.peek(_PIECE)
            self.take(len(piece) - len(piece.lstrip(b"\0")))


class _Walk:
    """One run over the cpio archives of a source."""

    def __init__(self, source: _Source, names: Sequence[str]) -> None:
        self.source = source
        self.names = names
        self.content: Optional[bytes] = None
        self.mdadm = False
        self._open: Optional[bool] = None
        """Whether an archive has begun and not ended yet; None before the first."""
        self._link: Optional[bytes] = None
        """Identity of a wanted file whose bytes come later in the archive, under another of its names."""

    def carried(self) -> Carried:
        """The parts that were read. Raises ``Damaged`` if it ends before an archive does."""
        if self.content is None and self._open is not False:
            raise Damaged("it is empty, or cut off after %d bytes" % self.source.position)
        return Carried(self.content, self.mdadm)

    def walk(self) -> bytes:
        """Go on until the file is found or the archives end. Returns the first bytes of what else follows."""
        while self.content is None:
            self.source.skip_padding()
            header = self.source.peek(_HEADER)
            if not _CPIO.fullmatch(header):
                if header and (self._open or header.startswith(b"07070")):
                    raise Damaged("it makes no sense after %d bytes" % self.source.position)
                return header[:6]
            self._entry(self.source.take(_HEADER))
        return b""

    def _entry(self, header: bytes) -> None:
        fields = [int(header[at : at + 8], 16) for at in range(6, _HEADER, 8)]
        mode, links, size, length = fields[1], fields[4], fields[6], fields[11]
        identity = header[6:14] + header[62:78]
        if not 0 < length <= _NAME_MAX:
            raise Damaged("a name in it has %d bytes" % length)
        name = self.source.take(length).rstrip(b"\0").decode("utf-8", "replace")
        self._pad()
        self._open = name != _END
        if not self._open:
            return
        name = re.sub(r"^(?:\.?/)+", "", name)
        self.mdadm = self.mdadm or _MDADM.fullmatch(name) is not None
        if name in self.names or identity == self._link:
            if not stat.S_ISREG(mode):
                raise Unreadable("its `%s` is no regular file" % name)
            if size > _FILE_MAX:
                raise Damaged("its `%s` has %d bytes" % (name, size))
            if size or links < 2:
                self.content = self.source.take(size)
                return
            self._link = identity
        self.source.skip(size)
        self._pad()

    def _pad(self) -> None:
        self.source.skip(-self.source.position % 4)


_Pieces = Generator[bytes, None, None]


def _unpacked(image: FileIO, magic: bytes) -> _Pieces:
    """Pieces of the unpacked data, from the current position of ``image`` on. Raises ``Unreadable``."""
    for begin, new in _LIBRARIES.items():
        if magic.startswith(begin):
            return _by_library(image, new)
    program = _PROGRAMS.get(magic[:4])
    if program is None:
        raise Unreadable("its form is not known here: it begins with %s" % magic[:4].hex())
    unpacker = shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/bin:/bin:/usr/local/bin")
    if unpacker is None:
        raise Unreadable("`%s`, which unpacks it, is not installed" % program)
    return _by_program(image, unpacker)


def _by_library(image: FileIO, new: Callable[[], Any]) -> _Pieces:
    unpacker = new()
    while True:
        # Little at a time: a thousand times as much may come out.
        packed = image.read(1 << 14)
        if not packed:
            return
        try:
            piece = unpacker.decompress(packed)
        except (zlib.error, lzma.LZMAError, OSError):
            return  # the archive in it has no end then
        if piece:
            yield piece
        if unpacker.eof:
            return


def _by_program(image: FileIO, program: str) -> _Pieces:
    child = subprocess.Popen([program, "-dc"], stdin=image, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        while child.stdout is not None:
            piece = child.stdout.read(_PIECE)
            if not piece:
                return
            yield piece
    finally:
        # What is wanted lies at the beginning: the rest is never unpacked.
        child.kill()
        child.communicate()
