"""Loads a model with one loader, several times in one process, and checks every byte; the program of perf/loading.py.

    .venv/bin/python perf/loading_child.py '{"loader": "tunetool", "directory": "DIR", "device": "cuda", "loads": 2}'

The last line of stdout is a JSON object: the seconds of each load, from before the import of the loader's library until
every byte is on the device (torch is imported and the device set up before that, which every loader needs); the bytes;
those of them that the kernel counted as fetched from drives; a digest of all tensors' bytes. The first load is that of
a fresh process, the others are warm. ``options`` go to ``tunetool.loading.load``.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tunetool.measure.process_reads import reads

PIECE = 32 << 20
"""Bytes of which one sum is made; less than a loader's own memory."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


@dataclass(frozen=True)
class Loader:
    """``load(directory, device, options)`` gives tensors by name, and what frees them; ``package`` installs it."""

    module: str
    package: str
    load: Callable[[Path, torch.device, Mapping[str, Any]], tuple[Mapping[str, Any], Callable[[], None]]]
    needs_gpu: bool = False


def files(directory: Path) -> list[str]:
    return [str(path) for path in sorted(directory.glob("*.safetensors"))]


def nothing() -> None:
    """Tensors that nothing but their names hold need no more."""


def by_tunetool(directory: Path, device: torch.device, options: Mapping[str, Any]) -> Any:
    return import_module("tunetool.loading").load(directory, device, **options), nothing


def by_safetensors(directory: Path, device: torch.device, options: Mapping[str, Any]) -> Any:
    library = import_module("safetensors.torch")
    tensors: dict[str, Any] = {}
    for file in files(directory):
        tensors.update(library.load_file(file, device=str(device)))
    if device.type == "cpu":  # it maps the file, and reads nothing yet
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    return tensors, nothing


def by_transformers(directory: Path, device: torch.device, options: Mapping[str, Any]) -> Any:
    library = import_module("transformers")
    (name,) = json.loads((directory / "config.json").read_text())["architectures"]
    model = getattr(library, name).from_pretrained(directory, dtype="auto").to(device)
    return dict(model.named_parameters()), nothing


def by_fastsafetensors(directory: Path, device: torch.device, options: Mapping[str, Any]) -> Any:
    library = import_module("fastsafetensors")
    loader = library.SafeTensorsFileLoader(library.SingleGroup(), device, nogds=True)
    loader.add_filenames({0: files(directory)})
    buffer = loader.copy_files_to_device()
    tensors = {name: buffer.get_tensor(name) for name in loader.get_keys()}

    def free() -> None:
        buffer.close()
        loader.close()

    return tensors, free


def by_runai(directory: Path, device: torch.device, options: Mapping[str, Any]) -> Any:
    library = import_module("runai_model_streamer")
    tensors = {}
    with library.SafetensorsStreamer() as streamer:
        streamer.stream_files(files(directory))
        for name, tensor in streamer.get_tensors():
            tensors[name] = tensor.clone() if device.type == "cpu" else tensor.to(device)
    return tensors, nothing


def by_instanttensor(directory: Path, device: torch.device, options: Mapping[str, Any]) -> Any:
    library = import_module("instanttensor")
    with library.safe_open(files(directory), framework="pt", device=device.index) as opened:
        return {name: tensor.clone() for name, tensor in opened.tensors()}, nothing


def by_kvikio(directory: Path, device: torch.device, options: Mapping[str, Any]) -> Any:
    library = import_module("kvikio")
    listing = import_module("tunetool.loading.safetensors_files").list_tensors(directory)
    opened = {name: library.CuFile(str(directory / name), "r") for name in listing.files}
    tensors, waiting = {}, []
    for name, stored in listing.tensors.items():
        tensors[name] = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device=device)
        if stored.length:
            memory = tensors[name].reshape(-1).view(torch.uint8)
            waiting.append(opened[stored.file].pread(memory, stored.length, stored.start))
    for each in waiting:
        each.get()
    for file in opened.values():
        file.close()
    return tensors, nothing


def by_hand(directory: Path, device: torch.device, options: Mapping[str, Any]) -> Any:
    """Every tensor by ``read``, with nothing of any loader: what the others must give."""
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "I64": "int64", "U8": "uint8"}
    tensors = {}
    for path in files(directory):
        with Path(path).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            start = file.tell()
            for name, entry in header.items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    file.seek(start + begin)
                    memory = torch.frombuffer(
                        bytearray(file.read(end - begin)), dtype=getattr(torch, names[entry["dtype"]])
                    )
                    tensors[name] = memory.reshape(entry["shape"]).to(device)
    return tensors, nothing


LOADERS = {
    "tunetool": Loader("tunetool.loading", "tunetool", by_tunetool),
    "instanttensor": Loader("instanttensor", "instanttensor", by_instanttensor, needs_gpu=True),
    "fastsafetensors": Loader("fastsafetensors", "fastsafetensors", by_fastsafetensors, needs_gpu=True),
    "runai": Loader("runai_model_streamer", "runai-model-streamer", by_runai),
    "kvikio": Loader("kvikio", "kvikio-cu12", by_kvikio, needs_gpu=True),
    "safetensors": Loader("safetensors", "safetensors", by_safetensors),
    "plain": Loader("torch", "torch", by_hand),
    "transformers": Loader("transformers", "transformers accelerate", by_transformers),
}
"""By name. A package of another CUDA is named by its own index: kvikio-cu13 for CUDA 13."""


def checksum(tensor: torch.Tensor) -> int:
    """A sum of all bytes that changes with any of them, and with their order."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = 0
    for start in range(0, len(data), PIECE):
        piece = data[start : start + PIECE]
        # A copy: a loader's tensors may begin at any byte.
        padded = torch.zeros(len(piece) + -len(piece) % 8, dtype=torch.uint8, device=data.device)
        padded[: len(piece)] = piece
        numbers = padded.view(torch.int64)
        weights = torch.arange(1, len(numbers) + 1, dtype=torch.int64, device=data.device) * _ODD
        part = int(((numbers ^ (numbers >> 29)) * (weights | 1)).sum())
        total = (total * 31 + part) % (1 << 64)
    return total


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of the bytes, shapes and dtypes of all tensors, whatever their order and names, which transformers changes."""
    rows = sorted(f"{tensor.dtype} {tuple(tensor.shape)} {checksum(tensor)}" for tensor in tensors)
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def pinned_speed(device: torch.device, size: int = 1 << 30, times: int = 8) -> float:
    """Bytes per second of copies from pinned memory to the GPU: no loader can be faster."""
    source, target = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        torch.empty(size, dtype=torch.uint8, device=device),
    )
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(times):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    return size * times / (time.perf_counter() - started)


def set_up(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    return device


def run(order: Mapping[str, Any]) -> dict[str, Any]:
    device = set_up(order["device"])

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    if order["loader"] == "pinned":
        return {"speed": pinned_speed(device)}
    loader, directory = LOADERS[order["loader"]], Path(order["directory"])
    answer: dict[str, Any] = {"seconds": [], "drives": [], "digests": []}
    finish()
    for _ in range(order["loads"]):
        before, started = reads(), time.perf_counter()
        tensors, free = loader.load(directory, device, order.get("options", {}))
        finish()
        answer["seconds"].append(time.perf_counter() - started)
        answer["drives"].append(reads().since(before).storage)
        answer["bytes"] = sum(tensor.nbytes for tensor in tensors.values())
        answer["digests"].append(digest(tensors.values()))
        # All names, before the memory behind them goes.
        tensors = {}
        gc.collect()
        free()
    return answer


def main() -> int:
    order = json.loads(sys.argv[1])
    try:
        print(json.dumps(run(order)))
    except Exception as error:  # of somebody else's library: one line for the table
        text = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")
        print(json.dumps({"error": text[:300]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
