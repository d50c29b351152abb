"""For PYTHONPATH: a Python with TUNETOOL_TESTS_STOP, the arguments of ``stops.install``, ends or stops at that point.

It is for programs that start another one. Programs that this one starts ignore the variable.
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
