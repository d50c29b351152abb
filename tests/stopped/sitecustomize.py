"""On PYTHONPATH: a Python that is started with TUNETOOL_TESTS_STOP, what ``stops.install`` is given, ends or stops there.

For programs that start another one by themselves. Of those that this one starts none heeds it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

order = os.environ.pop("TUNETOOL_TESTS_STOP", None)
if order is not None:
    sys.path.append(str(Path(__file__).parents[1]))
    import stops

    stops.install(**json.loads(order))
