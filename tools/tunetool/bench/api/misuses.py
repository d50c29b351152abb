"""Wrong uses of the handle, each a function of a ``Context`` (see ``child.py``).

It returns what happened where the use was refused, or did what was meant; it raises ``Wrong`` where the handle reports
a success that is none. An exception or the end of the process is a refusal too. Self-contained, as ``child.py`` is;
that gives it ``Wrong`` and ``Skipped``.
"""

from __future__ import annotations

import os
import resource
import runpy
import signal
from typing import Any

_calls = runpy.run_path(
    os.path.join(os.path.dirname(os.path.abspath(__file__)), "calls.py"),
    init_globals={name: globals().get(name, Exception) for name in ("Wrong", "Skipped")},
)
SIZE, locked, stored, store, demand = (_calls[name] for name in ("SIZE", "locked", "stored", "store", "demand"))
bytes_of, locked_kib, Wrong = (_calls[name] for name in ("bytes_of", "locked_kib", "Wrong"))


def _refused(returned: int) -> str | None:
    """What to say where the call says that it did nothing."""
    return "it returns %d" % returned if returned < 0 else None


def _read(context: Any, target: Any, path: str, content: bytes, offset: int = 0, **settings: Any) -> str:
    """Read into ``target``: refused, or the bytes of the file."""
    returned = context.handle(**settings).sync_pread(target, path, offset)
    expected = content[offset : offset + target.nbytes]
    got = bytes_of(context, target.contiguous())
    what = "it returns %d, and the tensor has %s" % (returned, "its old bytes" if not any(got) else "other bytes")
    demand(returned < 0 or got == expected, what)
    return _refused(returned) or "the right bytes"


def _write(context: Any, source: Any, path: str, offset: int = 0, **settings: Any) -> str:
    """Write ``source`` to a new file: refused, or all bytes there."""
    returned = context.handle(**settings).sync_pwrite(source, path, offset)
    size = os.path.getsize(path) if os.path.exists(path) else 0
    wanted = offset + source.nbytes
    whole = size == wanted and stored(path)[offset:] == bytes_of(context, source.contiguous())
    what = "%d of %d bytes" % (size, wanted) if size != wanted else "other bytes"
    demand(returned < 0 or whole, "it returns %d, and the file has %s" % (returned, what))
    return _refused(returned) or "the right bytes"


def _stored_bytes(context: Any, size: int = 2 * SIZE) -> tuple[str, bytes]:
    path, content = context.path("source"), os.urandom(size)
    store(path, content)
    return path, content


def short_file(context: Any) -> str:
    path, content = _stored_bytes(context, SIZE)
    return str(_read(context, locked(context, context.handle(), 2 * SIZE, False), path, content))


def missing_file(context: Any) -> str:
    target = locked(context, context.handle(), SIZE, False)
    return str(_read(context, target, context.path("absent"), b""))


def missing_directory(context: Any) -> str:
    return str(_write(context, locked(context, context.handle(), SIZE), os.path.join(context.path("absent"), "file")))


def unaligned_offset(context: Any) -> str:
    path, content = _stored_bytes(context)
    buffer = locked(context, context.handle(), SIZE, False)
    try:
        read, fault = _read(context, buffer, path, content, 100), ""
    except Wrong as wrong:
        read, fault = "", "read: %s; " % wrong
    try:
        written = _write(context, buffer.random_(0, 256), context.path("target"), 100)
    except Wrong as wrong:
        raise Wrong("%swrite: %s" % (fault, wrong)) from None
    demand(not fault, fault)
    return "read: %s; write: %s" % (read, written)


def unaligned_size(context: Any) -> str:
    return str(_write(context, locked(context, context.handle(), SIZE + 100), context.path("target")))


def unaligned_address(context: Any) -> str:
    path, content = _stored_bytes(context)
    whole = locked(context, context.handle(), 2 * SIZE, False)
    return str(_read(context, whole[100 : 100 + SIZE], path, content))


def indivisible(context: Any) -> str:
    source = locked(context, context.handle(), 3 * 4096)
    return str(_write(context, source, context.path("target"), intra_op_parallelism=5))


def strided_read(context: Any) -> str:
    path, content = _stored_bytes(context, SIZE)
    target = locked(context, context.handle(), SIZE, False).view(1024, 1024).t()
    return str(_read(context, target, path, content))


def idle_wait(context: Any) -> str:
    raise Wrong("it returns %d" % context.handle().wait())


def free_twice(context: Any) -> str:
    handle = context.handle()
    tensor = locked(context, handle, SIZE)
    handle.free_cpu_locked_tensor(tensor)
    demand(not handle.free_cpu_locked_tensor(tensor), "it returns True")
    return "it returns False"


def free_view(context: Any) -> str:
    handle = context.handle()
    before = locked_kib()
    tensor = locked(context, handle, SIZE)
    freed = handle.free_cpu_locked_tensor(tensor[:10])
    left = locked_kib() - before
    demand(left >= SIZE // 1024, "it returns %s and frees the whole tensor" % freed)
    return "it returns %s" % freed


def no_space(context: Any) -> str:
    source = locked(context, context.handle(), 2 * SIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return str(_write(context, source, context.path("target")))


def cast_strided(context: Any) -> str:
    numbers = context.torch.arange(64, dtype=context.torch.float32).reshape(8, 8).t()
    view = context.op("utils").cast_to_byte_tensor(numbers)
    equal = bytes_of(context, view) == bytes_of(context, numbers.contiguous())
    demand(equal, "it gives %d bytes, in the order of the memory, not of the tensor" % view.numel())
    return "the right bytes"


ROWS: dict[str, Any] = {
    "misuse.short-file": short_file,
    "misuse.missing-file": missing_file,
    "misuse.missing-directory": missing_directory,
    "misuse.unaligned-offset": unaligned_offset,
    "misuse.unaligned-size": unaligned_size,
    "misuse.unaligned-address": unaligned_address,
    "misuse.indivisible": indivisible,
    "misuse.strided-read": strided_read,
    "misuse.idle-wait": idle_wait,
    "misuse.free-twice": free_twice,
    "misuse.free-view": free_view,
    "misuse.no-space": no_space,
    "misuse.cast-strided": cast_strided,
}
"""By the end of the check's name."""
