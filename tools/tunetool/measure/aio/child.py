"""DeepSpeed's own I/O handle, in a process that may die. Self-contained: any Python from 3.8 with torch can run it.

``measure/child_server.py`` hands it the orders. It loads the compiled op from its file and never through DeepSpeed's
builder, which would compile it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from typing import Any

PAGE = 4096
# Where DeepSpeed's installer puts what it compiled, below deepspeed/ops.
FOLDERS = {"async_io": "aio", "gds": "gds", "pin_memory": "pin_memory", "utils": "", "cpu_adam": "adam"}


def find(name: str) -> Any:
    """The folder of an installed package, without importing it (DeepSpeed takes seconds); None without it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return os.path.dirname(os.path.realpath(spec.origin)) if spec and spec.origin else None


def variables_of(path: str) -> dict[str, Any]:
    """What a module that holds only constants defines."""
    variables: dict[str, Any] = {}
    with open(path, encoding="utf-8") as stream:
        exec(compile(stream.read(), path, "exec"), variables)  # noqa: S102  (torch's and DeepSpeed's own version files)
    return variables


def extension_root(torch_version: dict[str, Any]) -> str:
    """Where torch keeps extensions it compiled (torch.utils.cpp_extension._get_build_directory)."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given:
        return os.path.abspath(given)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    hip, cuda = torch_version.get("hip"), torch_version.get("cuda")
    accelerator = "cpu"
    if hip is not None or cuda is not None:
        accelerator = ("rocm" + hip if hip is not None else "cu" + str(cuda)).replace(".", "")
    version = "py%d%d%s" % (sys.version_info[0], sys.version_info[1], getattr(sys, "abiflags", ""))
    return os.path.join(os.path.realpath(os.path.join(cache, "torch_extensions")), version + "_" + accelerator)


def probe(order: dict[str, Any]) -> dict[str, Any]:
    """What this interpreter has; imports torch only where it could see a GPU."""
    answer: dict[str, Any] = {"python": sys.executable, "python_version": "%d.%d" % sys.version_info[:2]}
    torch_path, deepspeed_path = find("torch"), find("deepspeed")
    if torch_path:
        version = variables_of(os.path.join(str(torch_path), "version.py"))
        answer.update(torch_path=torch_path, torch=str(version["__version__"]), root=extension_root(version))
        answer["cuda"] = False
        if version.get("cuda"):
            import torch

            answer["cuda"] = bool(torch.cuda.is_available())
    if deepspeed_path:
        answer["deepspeed_path"] = deepspeed_path
        version_file = os.path.join(str(deepspeed_path), "git_version_info_installed.py")
        answer["deepspeed"] = str(variables_of(version_file)["version"]) if os.path.exists(version_file) else "unknown"
        ops = os.path.join(str(deepspeed_path), "ops")
        answer["installed"] = {name: installed(ops, name) for name in FOLDERS}
        builder = os.path.join(ops, "op_builder", "pin_memory.py")
        answer["needs_pin_memory"] = os.path.exists(builder)
    return answer


def installed(ops: str, name: str) -> Any:
    """The file of an op that was compiled when DeepSpeed was installed (DS_BUILD_OPS=1)."""
    folder = os.path.join(ops, FOLDERS[name])
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = os.path.join(folder, name + "_op" + suffix)
        if os.path.exists(path):
            return path
    return None


def load(path: str) -> Any:
    """The compiled module at ``path``."""
    name = os.path.basename(path).split(".", 1)[0]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("`%s` cannot be loaded" % path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LOADED: dict[str, Any] = {}
HANDLE = ("files", "device", "block_bytes", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")
"""Of an order: what a handle is made by."""


def load_all(files: list[str]) -> Any:
    """Load an op, the last of ``files``, after what it needs. Once: a second handle is not to cost a second load."""
    import torch  # noqa: F401  (the ops resolve their symbols in it)

    for path in files:
        if path not in LOADED:
            LOADED[path] = load(path)
            if path != files[-1]:
                # The op finds the one manager of locked memory by its symbol.
                ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return LOADED[files[-1]]


def own_runtime(path: str) -> bool:
    """Whether a library exports a C++ runtime of its own, which others then take parts of.

    A compiler that links libstdc++.a makes such. Two runtimes in one process share some symbols and not others, and the
    first number that is printed ends it (pytorch/pytorch#109923). Loads the library.
    """
    library = ctypes.CDLL(path)
    try:
        output = ctypes.addressof(ctypes.c_char.in_dll(library, "_ZSt4cout"))
    except ValueError:
        return False
    place = _Place()
    found = ctypes.CDLL(None).dladdr(ctypes.c_void_p(output), ctypes.byref(place))
    return bool(found) and os.path.realpath(os.fsdecode(place.file)) == os.path.realpath(path)


class _Place(ctypes.Structure):
    """``Dl_info`` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


class Mover:
    """One handle, one file, one buffer of the file's size."""

    def __init__(self, order: dict[str, Any]) -> None:
        import torch

        self.torch = torch
        self.path, self.bytes, self.device = order["file"], int(order["io_bytes"]), order["device"]
        if self.device != "cpu" and not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU")
        self.order = order
        self.made: dict[str, tuple[Any, int]] = {}
        self.handle = self._make(order)
        self.memory: Any = None if self.device == "cpu" else self._on_gpu()
        self.pinned: Any = None if self.device == "gds" else self._pinned(order["pinned_by"])
        source: Any = self.pinned if self.memory is None else self.memory
        source.view(torch.int64).random_()
        self.data: Any = source

    def _make(self, order: dict[str, Any]) -> Any:
        module = load_all(order["files"])
        maker = getattr(module, "gds_handle" if order["device"] == "gds" else "aio_handle")
        return maker(
            order["block_bytes"],
            order["queue_depth"],
            order["single_submit"],
            order["overlap_events"],
            order["intra_op_parallelism"],
        )

    def use(self, order: dict[str, Any]) -> dict[str, Any]:
        """Change to another handle over the same file and buffer, which is much faster than starting torch again.

        Handles are kept, up to ``keep`` requests in all: the kernel takes 30 ms to give up each of their queues.
        """
        if self.device == "gds":
            self.handle.unpin_device_tensor(self.memory)
        # DeepSpeeds whose handles each keep their own locked memory lose it with the handle.
        lost_with_handle = self.pinned is not None and order["pinned_by"] == "deepspeed" and not order["shared_memory"]
        kept = self.pinned.clone() if lost_with_handle else None
        if lost_with_handle:
            self.handle.free_cpu_locked_tensor(self.pinned)
        self.handle, self.device = self._kept(order), order["device"]
        if self.device == "gds":
            self.handle.pin_device_tensor(self.memory)
        elif lost_with_handle or self.pinned is None:
            self.pinned = self._pinned(order["pinned_by"])
            if kept is not None:
                self.pinned.copy_(kept)
        self.data = self.pinned if self.memory is None else self.memory
        return {}

    def _kept(self, order: dict[str, Any]) -> Any:
        key = json.dumps([order[name] for name in HANDLE])
        if key not in self.made:
            requests = order["queue_depth"] * (order["intra_op_parallelism"] + 1)
            while self.made and requests + sum(size for _, size in self.made.values()) > order["keep"]:
                del self.made[next(iter(self.made))]
            self.made[key] = (self._make(order), requests)
        return self.made[key][0]

    def close(self) -> None:
        """Give the locked memory back."""
        if self.pinned is not None and self.order["pinned_by"] == "deepspeed":
            self.handle.free_cpu_locked_tensor(self.pinned)
        self.made.clear()
        self.pinned = self.data = self.memory = self.handle = None

    def _on_gpu(self) -> Any:
        memory = self.torch.empty(self.bytes, dtype=self.torch.uint8, device="cuda")
        if self.device == "gds":
            self.handle.pin_device_tensor(memory)
        return memory

    def _pinned(self, pinned_by: str) -> Any:
        if pinned_by == "cuda":
            return self.torch.empty(self.bytes, dtype=self.torch.uint8, pin_memory=True)
        return self.handle.new_cpu_locked_tensor(self.bytes, self.torch.empty(0, dtype=self.torch.uint8))

    def facts(self) -> dict[str, Any]:
        buffer = self.pinned if self.pinned is not None else self.memory
        alignment = self.handle.get_alignment() if hasattr(self.handle, "get_alignment") else None
        return {"address": buffer.data_ptr(), "alignment": alignment}

    def move(self, order: dict[str, Any]) -> dict[str, Any]:
        """Whole passes over the file until ``seconds`` are over, at least one; or exactly ``loops``.

        ``file``: another one than the handle was made for, as large as it.
        """
        path = order.get("file", self.path)
        write, seconds, loops = order["direction"] == "write", order.get("seconds"), order.get("loops")
        if write:
            # Each page differs from what an earlier sample left in the file, which could be mistaken for this one's.
            mark = self.torch.tensor(list(order["stamp"].to_bytes(8, "little")), dtype=self.torch.uint8)
            pages = self.data[: self.bytes // PAGE * PAGE].view(-1, PAGE)
            pages[:, :8] = mark.to(self.data.device)
            self._settle()
        passes = []
        start, spent = time.perf_counter(), time.process_time()
        while True:
            began = time.perf_counter()
            self._write(path) if write else self._read(path)
            ended = time.perf_counter()
            passes.append(ended - began)
            enough = len(passes) >= loops if loops else ended - start >= (seconds or 0.0)
            if enough:
                break
        moved, spent = time.perf_counter() - start, time.process_time() - spent
        if write:
            handle = os.open(path, os.O_WRONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        durable = time.perf_counter() - start
        return {
            "bytes": self.bytes * len(passes),
            "seconds": moved,
            "durable_seconds": durable,
            "passes": passes,
            "cpu_seconds": spent,
        }

    def _write(self, path: str) -> None:
        if self.device == "cuda":
            self.pinned.copy_(self.memory)
        self._transfer("pwrite", self.memory if self.device == "gds" else self.pinned, path)

    def _read(self, path: str) -> None:
        self._transfer("pread", self.memory if self.device == "gds" else self.pinned, path)
        if self.device == "cuda":
            self.memory.copy_(self.pinned)
            self._settle()

    def _transfer(self, name: str, buffer: Any, path: str) -> None:
        """Move the whole buffer by the handle's method ``name``, in the way that the order asks for."""
        call, pending = self.order.get("call", "pwrite"), self.order.get("pending", 1)
        if call == "sync":
            completed = getattr(self.handle, "sync_" + name)(buffer, path)
        else:
            size = self.bytes // pending
            for offset in range(0, self.bytes, size):
                if call == "async":
                    submitted = getattr(self.handle, "async_" + name)(buffer[offset : offset + size], path, offset)
                else:
                    submitted = getattr(self.handle, name)(buffer, path, False, True)
                if submitted != 0:
                    raise OSError("the handle refused the transfer (it returned %s)" % submitted)
            completed = self.handle.wait()
        if completed != pending:
            raise OSError("the handle completed %s transfers of %s" % (completed, pending))

    def _settle(self) -> None:
        if self.device != "cpu":
            self.torch.cuda.synchronize()

    def clear(self) -> dict[str, Any]:
        """Forget the data, so that what is there after a read came from it."""
        for buffer in (self.pinned, self.memory):
            if buffer is not None:
                buffer.zero_()
        self._settle()
        return {}

    def digest(self) -> dict[str, Any]:
        """SHA-256 of the data in the buffer."""
        sha256 = hashlib.sha256()
        step = 64 * 2**20
        for start in range(0, self.bytes, step):
            part = self.data[start : start + step].cpu()
            sha256.update((ctypes.c_char * part.numel()).from_address(part.data_ptr()))
        return {"sha256": sha256.hexdigest()}


class Orders:
    """Takes the orders, and keeps what is open between them."""

    def __init__(self) -> None:
        self.mover: Mover | None = None

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "probe":
            return probe(order)
        if order["do"] == "load":
            load_all(order["files"])
            return {"own_runtime": [path for path in order["files"] if own_runtime(path)]}
        if order["do"] == "open":
            if self.mover is not None:
                self.mover.close()
            self.mover = Mover(order)
            return self.mover.facts()
        if self.mover is None:
            raise ValueError("nothing is open")
        return act(self.mover, order)


def act(mover: Mover, order: dict[str, Any]) -> dict[str, Any]:
    if order["do"] == "move":
        return mover.move(order)
    if order["do"] == "use":
        return mover.use(order)
    return mover.clear() if order["do"] == "clear" else mover.digest()


answer = Orders().answer
