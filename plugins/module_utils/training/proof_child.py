"""The checks of a training environment. Its Python runs them as the text of ``python -c``, without imports of tunetool.

The first argument names the check, the second is its order as JSON; the last line of the output is the answer as JSON.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
from typing import Any


def versions(order: dict[str, Any]) -> dict[str, Any]:
    """Versions from the metadata that pip wrote, without imports."""
    from importlib import metadata

    installed = {}
    for name in order["packages"]:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"python": "%d.%d.%d" % sys.version_info[:3], "versions": installed, "cuda": cuda_of_torch()}


def cuda_of_torch() -> Any:
    """The CUDA that torch was built for, from its version file."""
    spec = importlib.util.find_spec("torch")
    path = os.path.join(os.path.dirname(spec.origin), "version.py") if spec and spec.origin else ""
    if not os.path.exists(path):
        return None
    values: dict[str, Any] = {}
    with open(path, encoding="utf-8") as stream:
        exec(compile(stream.read(), path, "exec"), values)  # noqa: S102  (torch's own version file)
    return values.get("cuda")


def imports(order: dict[str, Any]) -> dict[str, Any]:
    """Import everything, and return what torch sees."""
    for name in order["modules"]:
        try:
            importlib.import_module(name)
        except BaseException as error:
            raise SystemExit("error: `import %s`: %s: %s" % (name, type(error).__name__, error)) from None
    torch = sys.modules["torch"]
    return {
        "cuda": torch.version.cuda,
        "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    }


def load(order: dict[str, Any]) -> dict[str, Any]:
    """Load the files of compiled ops in their order."""
    import ctypes

    import torch  # noqa: F401  (the ops resolve their symbols in it)

    for path in order["files"]:
        name = os.path.basename(path).split(".", 1)[0]
        loader = importlib.machinery.ExtensionFileLoader(name, path)
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        if spec is None:
            raise ImportError("`%s` has no loader" % path)
        loader.exec_module(importlib.util.module_from_spec(spec))
        # An op finds the manager of locked memory, of which there must be one, by its symbol.
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return {}


def loader(order: dict[str, Any]) -> dict[str, Any]:
    """Load ops with DeepSpeed's loader, which must not need to compile."""
    import deepspeed
    from torch.utils import cpp_extension

    def refuse(*_: Any, **__: Any) -> Any:
        raise SystemExit("error: DeepSpeed's loader would compile an op that is compiled")

    cpp_extension.load = refuse
    for op in order["ops"]:
        module = importlib.import_module("deepspeed.ops.op_builder" + (".utils" if op == "utils" else ""))
        names = {
            "async_io": "AsyncIOBuilder",
            "gds": "GDSBuilder",
            "utils": "UtilsBuilder",
            "cpu_adam": "CPUAdamBuilder",
        }
        getattr(module, names[op])().load()
    return {"deepspeed": deepspeed.__version__}


def step(order: dict[str, Any]) -> dict[str, Any]:
    """Train a tiny model for one step with DeepSpeed over all ranks, then check an all-reduce whose result is known."""
    import deepspeed
    import torch

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = order["backend"] == "nccl"
    if cuda:
        torch.cuda.set_device(rank)
    else:
        # DeepSpeed would compile it now.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=order["backend"], verbose=False)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    engine = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )[0]
    before = [each.detach().clone() for each in engine.module.parameters()]
    loss = engine(torch.ones(1, 8, device=engine.device)).pow(2).sum()
    engine.backward(loss)
    engine.step()
    if all(torch.equal(old, new) for old, new in zip(before, engine.module.parameters())):
        raise SystemExit("error: DeepSpeed's step changed no parameter")
    total = torch.full((1024,), float(rank + 1), device=engine.device)
    torch.distributed.all_reduce(total)
    expected = ranks * (ranks + 1) / 2
    if not bool((total == expected).all()):
        raise SystemExit("error: the all-reduce over %d ranks gave %r, not %r" % (ranks, total[0].item(), expected))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return {"loss": loss.item()}


def main() -> None:
    """Run the check that the first argument names."""
    work = {"versions": versions, "imports": imports, "load": load, "loader": loader, "step": step}[sys.argv[1]]
    answer = work(json.loads(sys.argv[2]))
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
