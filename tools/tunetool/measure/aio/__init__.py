"""DeepSpeed's own I/O handle, driven in a process of its own and held to what it claims.

``run`` moves data, ``measurements`` and ``unproven`` judge its outcome. Nothing here imports torch or deepspeed.
"""

from tunetool.measure.aio.driver import Outcome, Pass, run
from tunetool.measure.aio.figures import figure, measurements, name, unproven
from tunetool.measure.aio.ops import Probe, need, probe
from tunetool.measure.aio.spec import Device, Spec, default_io_bytes, default_parallelism
from tunetool.measure.worker import Failed, Missing

__all__ = [
    "Device",
    "Failed",
    "Missing",
    "Outcome",
    "Pass",
    "Probe",
    "Spec",
    "default_io_bytes",
    "default_parallelism",
    "figure",
    "measurements",
    "name",
    "need",
    "probe",
    "run",
    "unproven",
]
