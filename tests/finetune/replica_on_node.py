"""Makes replicas one after another, on a node of the tests' cluster: the options of each as JSON, and how it ended."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tunetool.checkpoint import replicate


def main(calls: list[dict[str, Any]]) -> None:
    for options in calls:
        metadata, stop_at = options.pop("metadata", None), options.pop("stop_at", None)
        work = replicate(**options, metadata=metadata and Path(metadata).read_bytes())
        if stop_at:
            while not Path(stop_at).exists():
                time.sleep(0.05)
            assert work.running
            work.stop()
            assert not work.running
        print(json.dumps(asdict(work.wait())), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
