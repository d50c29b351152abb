"""The documented calls and casts, each a function of a ``Context`` (see ``child.py``) that returns what it found.

Self-contained, as ``child.py`` is; that gives it ``Wrong`` and ``Skipped``.
"""

from __future__ import annotations

import itertools
import os
import threading
from typing import Any

Skipped: Any = globals().get("Skipped", Exception)
Wrong: Any = globals().get("Wrong", Exception)

SIZE = 2**20
"""Bytes of a transfer: eight blocks, one for each of the most threads."""
_DTYPES = (
    *("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "bool", "uint8", "int8", "int16"),
    *("int32", "int64", "complex64", "complex128"),
)


def demand(holds: bool, otherwise: str) -> None:
    """Raise ``Wrong`` unless it holds."""
    if not holds:
        raise Wrong(otherwise)


def locked(context: Any, handle: Any, size: int, fill: bool = True) -> Any:
    """Locked bytes, at random or zero."""
    tensor = handle.new_cpu_locked_tensor(size, context.torch.empty(0, dtype=context.torch.uint8))
    return tensor.random_(0, 256) if fill else tensor.zero_()


def bytes_of(context: Any, tensor: Any) -> bytes:
    """The bytes of a contiguous tensor, copied."""
    return bytes(context.byte_view(tensor).cpu().numpy())


def stored(path: str) -> bytes:
    """What the file holds."""
    with open(path, "rb") as file:
        return file.read()


def store(path: str, content: bytes) -> None:
    """Make a file that direct I/O can read at once."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def locked_kib() -> int:
    """How much memory of this process is locked."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmLck:"))


def dtypes(context: Any) -> list[Any]:
    """Every dtype that this torch has."""
    return [getattr(context.torch, name) for name in _DTYPES if hasattr(context.torch, name)]


def names(found: list[Any]) -> str:
    return ", ".join(str(each).replace("torch.", "") for each in found)


def runtime(context: Any) -> str:
    context.op("async_io")
    own = [os.path.basename(path) for path in context.ops["async_io"] if context.own_runtime(path)]
    demand(not own, "%s: a runtime beside torch's; to print a number may end the process" % ", ".join(own))
    return "one runtime, torch's"


def new_locked(context: Any) -> str:
    torch, handle = context.torch, context.handle()
    before = locked_kib()
    tensor = handle.new_cpu_locked_tensor(1024, torch.Tensor())
    more, address = locked_kib() - before, tensor.data_ptr()
    demand(tuple(tensor.shape) == (1024,), "shape %s" % (tuple(tensor.shape),))
    demand(tensor.dtype == torch.float32, "dtype %s" % tensor.dtype)
    demand(more >= 4, "%d KiB more are locked, for 4 KiB" % more)
    demand(address % context.sector == 0, "its address %#x is not aligned to %d bytes" % (address, context.sector))
    return "torch.Size([1024]), torch.float32, %d KiB locked, page-aligned" % more


def locked_dtypes(context: Any) -> str:
    torch, handle = context.torch, context.handle()
    for dtype in dtypes(context):
        tensor = handle.new_cpu_locked_tensor(1024, torch.empty(0, dtype=dtype))
        demand(tensor.dtype == dtype, "%s for an example of %s" % (tensor.dtype, dtype))
        demand(tensor.nbytes == 1024 * torch.empty(1, dtype=dtype).element_size(), "%d bytes" % tensor.nbytes)
        handle.free_cpu_locked_tensor(tensor)
    return names(dtypes(context))


def free_locked(context: Any) -> str:
    handle = context.handle()
    before = locked_kib()
    tensor = locked(context, handle, SIZE)
    held = locked_kib() - before
    demand(handle.free_cpu_locked_tensor(tensor) is True, "it returns no True")
    left = locked_kib() - before
    demand(held >= SIZE // 1024, "%d KiB were locked for 1024" % held)
    demand(left == 0, "%d KiB stay locked" % left)
    other = handle.free_cpu_locked_tensor(context.torch.zeros(4))
    demand(other is False, "a tensor of torch's own is freed too")
    return "%d KiB locked, then 0; False for a tensor that it did not lock" % held


def is_pinned(context: Any) -> str:
    handle = context.handle()
    if not hasattr(handle, "is_pinned"):
        raise Skipped("this DeepSpeed has no is_pinned")
    answers = (handle.is_pinned(locked(context, handle, 4096)), handle.is_pinned(context.torch.zeros(4096)))
    demand(answers == (True, False), "%s for a locked tensor, %s for another" % answers)
    return "True for a locked tensor, False for another"


_GETTERS = ("get_block_size", "get_queue_depth", "get_single_submit", "get_overlap_events", "get_intra_op_parallelism")


def getters(context: Any) -> str:
    module = context.op("async_io")
    defaults = (2**20, 128, False, False, 1)
    for given in ((), (256 * 1024, 16, True, True, 4), (4096, 1, False, True, 2)):
        handle = module.aio_handle(*given)
        got = tuple(getattr(handle, name)() for name in _GETTERS)
        demand(got == (given or defaults), "%s where %s was given" % (got, given or "nothing"))
        if hasattr(handle, "get_alignment"):
            alignment, threads = handle.get_alignment(), handle.get_intra_op_parallelism()
            demand(alignment == 512 * threads, "get_alignment is %s with %d threads" % (alignment, threads))
    return "as given; defaults: block 1 MiB, depth 128, no flags, 1 thread; alignment 512 x threads"


def read_write(context: Any) -> str:
    handle = context.handle()
    source, target, path = locked(context, handle, SIZE), locked(context, handle, SIZE, False), context.path("whole")
    returned = (handle.write(source, path, False), handle.read(target, path, False))
    demand(min(returned) >= 0, "they return %s and %s" % returned)
    demand(stored(path) == bytes_of(context, source), "the file holds other bytes")
    demand(context.torch.equal(source, target), "other bytes are read")
    note = "" if returned == (1, 1) else "; they return %s and %s, where their docstrings say a count" % returned
    return "equal" + note


def _move(context: Any, handle: Any, size: int, name: str, offset: int = 0) -> None:
    """Write and read ``size`` bytes at ``offset`` by the synchronous calls; both must be right."""
    source, target = locked(context, handle, size), locked(context, handle, size, False)
    path = context.path(name)
    _returns(handle.sync_pwrite(source, path, offset), 1, "sync_pwrite")
    demand(stored(path)[offset:] == bytes_of(context, source), "the file holds other bytes")
    _returns(handle.sync_pread(target, path, offset), 1, "sync_pread")
    demand(context.torch.equal(source, target), "other bytes are read")
    for tensor in (source, target):
        handle.free_cpu_locked_tensor(tensor)


def _returns(returned: int, expected: int, what: str) -> None:
    demand(returned == expected, "%s returns %s, not %s" % (what, returned, expected))


def sync(context: Any) -> str:
    _move(context, context.handle(), SIZE, "sync")
    return "1 and 1, equal in the file and in memory"


def asynchronous(context: Any) -> str:
    handle = context.handle()
    source, target, path = locked(context, handle, SIZE), locked(context, handle, SIZE, False), context.path("async")
    _returns(handle.async_pwrite(source, path), 0, "async_pwrite")
    _returns(handle.wait(), 1, "wait")
    demand(stored(path) == bytes_of(context, source), "the file holds other bytes")
    _returns(handle.async_pread(target, path), 0, "async_pread")
    _returns(handle.wait(), 1, "wait")
    demand(context.torch.equal(source, target), "other bytes are read")
    return "0 and 1 each, equal in the file and in memory"


def pread_pwrite(context: Any) -> str:
    handle = context.handle()
    for number, (validate, later) in enumerate(itertools.product((False, True), repeat=2)):
        source, target = locked(context, handle, SIZE), locked(context, handle, SIZE, False)
        path = context.path("flags%d" % number)
        for what, move, tensor in (("pwrite", handle.pwrite, source), ("pread", handle.pread, target)):
            returned = move(tensor, path, validate, later)
            _returns(returned, 0 if later else 1, what)
            if later:
                _returns(handle.wait(), 1, "wait")
        demand(stored(path) == bytes_of(context, source), "the file holds other bytes")
        demand(context.torch.equal(source, target), "other bytes are read")
    return "equal with each of the 4 combinations"


def async_fd(context: Any) -> str:
    handle = context.handle()
    source, path = locked(context, handle, SIZE), context.path("descriptor")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        returned = handle.async_pwrite(source, descriptor, SIZE)
    except TypeError:
        raise Skipped("this DeepSpeed takes names alone") from None
    else:
        _returns(returned, 0, "async_pwrite")
        _returns(handle.wait(), 1, "wait")
    finally:
        os.close(descriptor)
    demand(stored(path) == bytes(SIZE) + bytes_of(context, source), "the file holds other bytes")
    return "equal, at an offset; the descriptor stays open"


def pending(context: Any) -> str:
    handle, count = context.handle(), 6
    parts = [locked(context, handle, SIZE) for _ in range(count)]
    blanks = [locked(context, handle, SIZE, False) for _ in range(count)]
    path = context.path("pending")
    for number, part in enumerate(parts):
        _returns(handle.async_pwrite(part, path, number * SIZE), 0, "async_pwrite")
    _returns(handle.wait(), count, "wait")
    demand(stored(path) == b"".join(bytes_of(context, part) for part in parts), "the file holds other bytes")
    for number, blank in enumerate(blanks):
        _returns(handle.async_pread(blank, path, number * SIZE), 0, "async_pread")
    _returns(handle.wait(), count, "wait")
    demand(all(map(context.torch.equal, parts, blanks)), "other bytes are read")
    return "%d each, all equal" % count


def offset_write(context: Any) -> str:
    handle, path = context.handle(), context.path("parts")
    around = os.urandom(4 * SIZE)
    store(path, around)
    part = locked(context, handle, SIZE)
    _returns(handle.sync_pwrite(part, path, SIZE + 4096), 1, "sync_pwrite")
    expected = around[: SIZE + 4096] + bytes_of(context, part) + around[2 * SIZE + 4096 :]
    demand(stored(path) == expected, "the file holds other bytes")
    _returns(handle.sync_pwrite(part, path, 4 * SIZE), 1, "sync_pwrite")
    demand(stored(path) == expected + bytes_of(context, part), "other bytes after a write at the end of the file")
    return "the part in the middle and the one at the end are equal; all others stay"


def offset_read(context: Any) -> str:
    handle, path = context.handle(), context.path("parts")
    content = os.urandom(3 * SIZE)
    store(path, content)
    offsets = (0, 4096, SIZE + 8192, 2 * SIZE)
    for offset in offsets:
        part = locked(context, handle, SIZE, False)
        _returns(handle.sync_pread(part, path, offset), 1, "sync_pread")
        demand(bytes_of(context, part) == content[offset : offset + SIZE], "other bytes from offset %d" % offset)
    return "equal from offsets %s" % ", ".join(map(str, offsets))


def parallel(context: Any) -> str:
    for threads in (1, 2, 4, 8):
        _move(context, context.handle(intra_op_parallelism=threads), 2 * SIZE, "threads%d" % threads, threads * 4096)
    return "equal with each, at an offset"


def flags(context: Any) -> str:
    for single, overlap in itertools.product((False, True), repeat=2):
        handle = context.handle(single_submit=single, overlap_events=overlap, intra_op_parallelism=2)
        _move(context, handle, SIZE, "flags-%d-%d" % (single, overlap))
    return "equal with each of the 4 combinations"


def two_handles(context: Any) -> str:
    # Two threads whose first writes of the process met did not end, once. By the source, the op warns of the endurance
    # of drives then, and holds a lock of its own while it waits for Python's.
    _move(context, context.handle(), SIZE, "alone")
    faults: list[str] = []

    def move(name: str) -> None:
        try:
            handle = context.handle(intra_op_parallelism=2)
            for number in range(4):
                _move(context, handle, SIZE, "%s-%d" % (name, number))
        except Exception as error:
            faults.append(str(error))

    threads = [threading.Thread(target=move, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    demand(not faults, "; ".join(faults))
    return "equal, 4 files each"


def not_locked(context: Any) -> str:
    torch, handle = context.torch, context.handle()
    numbers = torch.arange(SIZE // 4, dtype=torch.int32)
    for name, source, target in (
        ("contiguous", numbers, torch.zeros_like(numbers)),
        ("strided", numbers.repeat_interleave(2)[::2], torch.zeros(2 * len(numbers), dtype=torch.int32)[::2]),
    ):
        path = context.path(name)
        _returns(handle.sync_pwrite(source, path), 1, "sync_pwrite")
        demand(stored(path) == bytes_of(context, numbers), "the file holds other bytes than the %s tensor" % name)
        _returns(handle.sync_pread(target, path), 1, "sync_pread")
        demand(torch.equal(target, source), "other bytes are read into the %s tensor" % name)
    return "equal, through a buffer of the handle"


def gpu(context: Any) -> str:
    torch = _with_gpu(context)
    handle, path = context.handle(intra_op_parallelism=2), context.path("gpu")
    source = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    _returns(handle.sync_pwrite(source, path, 4096), 1, "sync_pwrite")
    demand(stored(path)[4096:] == bytes_of(context, source), "the file holds other bytes")
    _returns(handle.sync_pread(target, path, 4096), 1, "sync_pread")
    torch.cuda.synchronize()
    demand(torch.equal(source, target), "other bytes are read")
    return "equal, through a buffer of the handle"


def gds(context: Any) -> str:
    torch = _with_gpu(context)
    handle, path = context.op("gds").gds_handle(128 * 1024, 8, False, True, 2), context.path("gds")
    source = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    for tensor in (source, target):
        demand(bool(handle.pin_device_tensor(tensor)), "pin_device_tensor returns no True")
    for offset in (0, 4096):
        _returns(handle.sync_pwrite(source, path, offset), 1, "sync_pwrite")
        demand(stored(path)[offset:] == bytes_of(context, source), "the file holds other bytes")
        target.zero_()
        _returns(handle.sync_pread(target, path, offset), 1, "sync_pread")
        torch.cuda.synchronize()
        demand(torch.equal(source, target), "other bytes are read")
        os.unlink(path)
    for tensor in (source, target):
        handle.unpin_device_tensor(tensor)
    return "equal, at two offsets"


def _with_gpu(context: Any) -> Any:
    if "cuda" in context.missing:
        raise Skipped(context.missing["cuda"])
    return context.torch


def _seeds_snippet(context: Any, device: str) -> str:
    torch = context.torch
    numbers = torch.zeros(1024, dtype=torch.bfloat16, device=device)
    view = context.byte_view(numbers)
    demand(view.data_ptr() == numbers.data_ptr(), "the bytes are a copy")
    demand(view.dtype == torch.uint8 and view.numel() == 2048, "%d of %s" % (view.numel(), view.dtype))
    numbers += 1.0
    demand(view.tolist() == [128, 63] * 1024, "the bytes do not follow")
    view.zero_()
    demand(not bool(numbers.any()), "the numbers do not follow")
    return "the same address; 128, 63, 128, 63 ..."


def cast_alias(context: Any) -> str:
    return _seeds_snippet(context, "cpu")


def cast_gpu(context: Any) -> str:
    _with_gpu(context)
    return _seeds_snippet(context, "cuda")


def cast_dtypes(context: Any) -> str:
    torch, handle = context.torch, context.handle()
    for dtype in dtypes(context):
        size = torch.empty(1, dtype=dtype).element_size()
        pair = [handle.new_cpu_locked_tensor(8192 // size, torch.empty(0, dtype=dtype)) for _ in range(2)]
        source, target = map(context.byte_view, pair)
        # A bool with another byte than 0 and 1 would be none.
        source.random_(0, 2 if dtype == torch.bool else 256)
        target.zero_()
        path = context.path(str(dtype))
        _returns(handle.sync_pwrite(source, path), 1, "sync_pwrite")
        _returns(handle.sync_pread(target, path), 1, "sync_pread")
        demand(stored(path) == bytes_of(context, pair[1]), "%s: other bytes are read" % dtype)
        demand(bytes_of(context, pair[0]) == bytes_of(context, pair[1]), "%s: the tensors differ" % dtype)
    return names(dtypes(context))


def cast_refused(context: Any) -> str:
    torch = context.torch
    numbers = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    pairs = torch.complex(numbers, numbers + 1)
    cases = {
        "transposed": numbers.t(),
        "every second": numbers[:, ::2],
        "columns": numbers[:, :4],
        "strided bool": (numbers > 3)[:, ::2],
        "conjugated": pairs.conj(),
        "negated": pairs.conj().imag,
        "sparse": numbers.to_sparse(),
    }
    taken = []
    for name, tensor in cases.items():
        try:
            view = context.byte_view(tensor)
        except ValueError:
            continue
        taken.append("%s (%d bytes)" % (name, view.numel()))
    demand(not taken, "taken: %s" % ", ".join(taken))
    return "%d kinds refused: %s%s" % (len(cases), ", ".join(cases), _torch_alone(context, cases))


def _torch_alone(context: Any, cases: dict[str, Any]) -> str:
    """Which of them ``view`` takes by itself."""
    taken = []
    for name, tensor in cases.items():
        try:
            tensor.view(context.torch.uint8)
        except (RuntimeError, NotImplementedError):
            continue
        taken.append(name)
    return "; tensor.view(torch.uint8) alone takes %s" % (", ".join(taken) or "none of them")


def cast_deepspeed(context: Any) -> str:
    torch, cast = context.torch, context.op("utils").cast_to_byte_tensor
    for dtype in dtypes(context):
        numbers = torch.zeros(1024, dtype=dtype)
        given, own = cast(numbers), context.byte_view(numbers)
        demand(given.dtype == torch.uint8, "%s gives %s" % (dtype, given.dtype))
        demand((given.data_ptr(), given.numel()) == (own.data_ptr(), own.numel()), "%s: other memory" % dtype)
    return names(dtypes(context))


ROWS: dict[str, Any] = {
    "call.runtime": runtime,
    "call.new-locked": new_locked,
    "call.locked-dtypes": locked_dtypes,
    "call.free-locked": free_locked,
    "call.is-pinned": is_pinned,
    "call.getters": getters,
    "call.read-write": read_write,
    "call.sync": sync,
    "call.async": asynchronous,
    "call.pread-pwrite": pread_pwrite,
    "call.async-fd": async_fd,
    "call.pending": pending,
    "call.offset-write": offset_write,
    "call.offset-read": offset_read,
    "call.parallel": parallel,
    "call.flags": flags,
    "call.two-handles": two_handles,
    "call.not-locked": not_locked,
    "call.gpu": gpu,
    "call.gds": gds,
    "cast.alias": cast_alias,
    "cast.dtypes": cast_dtypes,
    "cast.gpu": cast_gpu,
    "cast.refused": cast_refused,
    "cast.deepspeed": cast_deepspeed,
}
"""By the end of the check's name."""
