"""Wheels of some kilobytes under the names of the large ones, made in the test: a real venv takes them, real pip installs
them, real processes train by them. What they leave out is speed.

torch has a tensor of one dimension and an all-reduce over TCP, DeepSpeed one step, tunetool a `build-ops` that compiles an
extension of four lines by the real compiler.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunetool.node.training import lock

TORCH = """
import os, socket, struct, sys, time, types
class Tensor:
    def __init__(self, data, device="cpu"): self.data, self.device = list(data), device
    def detach(self): return self
    def clone(self): return Tensor(self.data, self.device)
    def pow(self, power): return Tensor([x ** power for x in self.data])
    def sum(self): return Tensor([sum(self.data)])
    def item(self): return self.data[0]
    def __eq__(self, other): return Tensor([x == other for x in self.data])
    def __getitem__(self, index): return Tensor([self.data[index]])
    def all(self): return all(self.data)
    def numel(self): return len(self.data)
def ones(*shape, device="cpu"): return full(shape, 1.0, device=device)
def full(shape, value, device="cpu"): return Tensor([value] * shape[-1], device)
def equal(a, b): return a.data == b.data
def manual_seed(seed): pass
version = types.SimpleNamespace(cuda=None)
cuda = types.SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)
class Linear:
    def __init__(self, inputs, outputs): self.weight = Tensor([0.5] * inputs)
    def parameters(self): return [self.weight]
    def __call__(self, x): return Tensor([sum(w * v for w, v in zip(self.weight.data, x.data))])
nn = types.SimpleNamespace(Linear=Linear)
class SGD:
    def __init__(self, parameters, lr): self.parameters, self.lr = list(parameters), lr
optim = types.SimpleNamespace(SGD=SGD)
class distributed:
    peers = []
    @classmethod
    def connect(cls):
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        place = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
        if rank == 0:
            with socket.create_server(place) as server: cls.peers = [server.accept()[0] for _ in range(ranks - 1)]
        else:
            while True:
                try: cls.peers = [socket.create_connection(place)]; break
                except OSError: time.sleep(0.05)
    @classmethod
    def all_reduce(cls, tensor):
        form = "%dd" % len(tensor.data)
        def receive(peer):
            data = b""
            while len(data) < struct.calcsize(form): data += peer.recv(65536)
            return struct.unpack(form, data)
        if int(os.environ["RANK"]) == 0:
            for other in [receive(peer) for peer in cls.peers]: tensor.data = [a + b for a, b in zip(tensor.data, other)]
            for peer in cls.peers: peer.sendall(struct.pack(form, *tensor.data))
        else:
            cls.peers[0].sendall(struct.pack(form, *tensor.data)); tensor.data = list(receive(cls.peers[0]))
    @classmethod
    def barrier(cls): cls.all_reduce(Tensor([1.0]))
    @classmethod
    def destroy_process_group(cls): pass
"""

DEEPSPEED = """
import os, time, types, torch
BEHAVIOUR = %r
ops = types.SimpleNamespace(__compatible_ops__={})
def init_distributed(dist_backend, verbose): torch.distributed.connect()
class Engine:
    device = "cpu"
    def __init__(self, model, optimizer): self.module, self.optimizer = model, optimizer
    def __call__(self, x): return self.module(x)
    def backward(self, loss): pass
    def step(self):
        if "TINY_LOG" in os.environ:
            with open(os.environ["TINY_LOG"], "a") as log: log.write("step\\n")
        while BEHAVIOUR == "wait" and os.path.exists(os.environ["TINY_WAIT"]): time.sleep(0.05)
        if BEHAVIOUR == "hang": time.sleep(3600)
        if BEHAVIOUR != "idle":
            for each in self.optimizer.parameters: each.data = [value - self.optimizer.lr for value in each.data]
def initialize(model, optimizer, config): return (Engine(model, optimizer), None, None, None)
"""

TUNETOOL = '''
import os, subprocess, sys
SOURCE = r"""
extern void *PyModule_Create2(void *, int);
struct { long refs; void *type, *init; long index; void *copy; const char *name, *text; long size; void *rest[5]; }
  definition = {1, 0, 0, 0, 0, "NAME", 0, -1, {0, 0, 0, 0, 0}};
void *PyInit_NAME(void) { CODE return PyModule_Create2(&definition, 1013); }
"""
op = sys.argv[sys.argv.index("--op") + 1]
if "TINY_LOG" in os.environ:
    with open(os.environ["TINY_LOG"], "a") as log: log.write("build %s\\n" % op)
if op == "utils": sys.exit("error: no compiler for `utils`\\nhint: none")
folder = os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], op)
os.makedirs(folder)
source = os.path.join(folder, op + ".c")
with open(source, "w") as stream:
    stream.write(SOURCE.replace("NAME", op).replace("CODE", "__builtin_trap();" if os.environ.get("TINY_TRAP") else ""))
subprocess.run(["cc", "-shared", "-fPIC", "-o", os.path.join(folder, op + ".so"), source], check=True)
'''

EMPTY = ("transformers", "peft", "accelerate", "tokenizers", "safetensors", "numpy", "pillow", "lightning")
VERSIONS = {"torch": "2.13.0", "deepspeed": "0.19.8", "tunetool": "0.1.0"}
EXTRAS = {
    "deepspeed": ["torch", "deepspeed"],
    "checkpoint": ["numpy"],
    "engines": ["safetensors"],
    "finetune": ["transformers", "peft", "accelerate", "tokenizers", "pillow"],
    "lightning": ["lightning"],
    "node": [],
}
"""Of tunetool's wheel."""
PYPROJECT = "".join(f"{name} = {json.dumps(needed)}\n" for name, needed in (("dependencies", []), *EXTRAS.items()))
LOCK = "".join(f"{name}=={VERSIONS.get(name, '1.0')}\n" for name in ("torch", "deepspeed", *EMPTY))


def wheel(
    directory: Path,
    name: str,
    files: dict[str, str | bytes],
    version: str = "1.0",
    tag: str = "py3-none-any",
    metadata: str = "",
) -> Path:
    """A wheel with these files."""
    information = f"{name}-{version}.dist-info"
    named: dict[str, bytes] = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
    named[f"{information}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}".encode()
    named[f"{information}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
    )
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for path, data in named.items()
    )
    named[f"{information}/RECORD"] = f"{record}{information}/RECORD,,\n".encode()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for inside, data in named.items():
            # All files get the same time, so that the same content has the same hash.
            archive.writestr(zipfile.ZipInfo(inside, (2020, 1, 1, 0, 0, 0)), data)
    return path


def libraries(directory: Path, behaviour: str = "", more: dict[str, str] | None = None) -> list[Path]:
    """All wheels but tunetool and pip. ``behaviour`` of DeepSpeed's step: idle, hang, wait."""
    paths = [
        wheel(directory, "torch", {"torch/__init__.py": TORCH}, VERSIONS["torch"]),
        wheel(directory, "deepspeed", {"deepspeed/__init__.py": DEEPSPEED % behaviour}, VERSIONS["deepspeed"]),
    ]
    for name in EMPTY:
        module = "PIL" if name == "pillow" else name
        paths.append(wheel(directory, name, {f"{module}/__init__.py": (more or {}).get(name, "")}))
    return paths


def tool(directory: Path, more: Mapping[str, Sequence[str]] | None = None) -> list[Path]:
    """tunetool's wheel, and pip's own: that of this Python, as a wheel again. ``more``: changed extras."""
    files: dict[str, str | bytes] = {"tunetool/__init__.py": "", "tunetool/__main__.py": TUNETOOL}
    files.update({f"tunetool/{name}/__init__.py": "" for name in ("checkpoint", "training")})
    # What it needs, as its own metadata say it.
    extras = {**EXTRAS, **(more or {})}
    lines = [f"Provides-Extra: {extra}\n" for extra in extras]
    lines += [f"Requires-Dist: {each}; extra == '{extra}'\n" for extra, names in extras.items() for each in names]
    made = wheel(directory, "tunetool", files, VERSIONS["tunetool"], metadata="".join(lines))
    return [made, pip(directory)]


def pip(directory: Path) -> Path:
    """A wheel of the pip that runs here."""
    distribution = importlib.metadata.distribution("pip")
    files: dict[str, str | bytes] = {}
    for path in distribution.files or []:
        if path.parts[0] == "pip" and path.suffix != ".pyc":
            files[str(path)] = Path(str(distribution.locate_file(path))).read_bytes()
    return wheel(directory, "pip", files, distribution.version)


def entry(path: Path, unpacked: int | None = None) -> dict[str, Any]:
    """The entry of a wheel in a wheelhouse's manifest, with its name."""
    with zipfile.ZipFile(path) as archive:
        size = sum(each.file_size for each in archive.infolist())
    return {
        "name": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "size_bytes": path.stat().st_size,
        "unpacked_bytes": size if unpacked is None else unpacked,
    }


def control_machine(base: Path, pythons: Sequence[str]) -> None:
    """The files of a control machine: base/house, a wheelhouse; base/tool.tar; base/source, a collection's lock."""
    (base / "source").mkdir(parents=True)
    (base / "source/constraints.txt").write_text(LOCK)
    (base / "source/pyproject.toml").write_text(PYPROJECT)
    with tarfile.open(base / "tool.tar", "w") as archive:
        for path in tool(base / "tool"):
            archive.add(path, path.name)
    entries = [entry(path) for path in libraries(base / "house")]
    files = {each.pop("name"): each for each in entries}
    kind = {"machine": os.uname().machine, "build": "cpu", "trainers": ["deepspeed", "lightning"]}
    document = {
        "schema": "tunetool.wheelhouse/1",
        "lock_sha256": lock.digest(lock.whole(LOCK, PYPROJECT)),
        "sets": [{**kind, "python": python, "files": sorted(files)} for python in pythons],
        "files": files,
    }
    (base / "house/wheelhouse.json").write_text(json.dumps(document))


if __name__ == "__main__":
    control_machine(Path(sys.argv[1]), sys.argv[2:])
