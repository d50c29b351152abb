"""For PYTHONPATH: a Python with TUNETOOL_TESTS_STOP, the arguments of ``stops.install``, ends or stops at that point.

It is for programs that start another one. Programs that this one starts ignore the variable, unless it is a list of
such arguments: then all of them look out for these points, and what is signalled is the first of them.
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

    orders = json.loads(order)
    if isinstance(orders, list):
        orders = [{"process": os.getpid(), **each} for each in orders]
        os.environ["TUNETOOL_TESTS_STOP"] = json.dumps(orders)
    for each in orders if isinstance(orders, list) else [orders]:
        stops.install(**each)
