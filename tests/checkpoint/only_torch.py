"""Saves, loads and unpickles with torch alone, in a process that cannot import tunetool. Orders come on stdin.

Run with ``-S``, so that no .pth file of the environment leads to tunetool; the first argument is its site-packages.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]
sys.path.append(sys.argv[1])
warnings.simplefilter("ignore")

import seeded  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

assert importlib.util.find_spec("tunetool") is None, "tunetool can be imported here"

for line in sys.stdin:
    order = json.loads(line)
    answer: dict[str, object] = {}
    try:
        state = seeded.state(order.get("seed", 0), order.get("megabytes", 0.0))
        if order["do"] == "unpickle":
            metadata = pickle.loads(Path(order["path"]).read_bytes())
            answer["tensors"] = {name: repr(each) for name, each in metadata.state_dict_metadata.items()}
            answer["stored"] = sorted(repr((index, info.length)) for index, info in metadata.storage_data.items())
        elif order["do"] == "save":
            writer = dcp.FileSystemWriter(order["path"], **order.get("settings", {}))
            dcp.save(state, storage_writer=writer)
        else:
            loaded = seeded.blank(state)
            dcp.load(loaded, storage_reader=dcp.FileSystemReader(order["path"]))
            answer["difference"] = seeded.difference(state, loaded)
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
