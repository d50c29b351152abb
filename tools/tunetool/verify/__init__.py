"""Whether this node is as it was built and as fast as it was promised: checks, measurements, and the verdict. It may
import ``measure`` with its drivers, ``verdict``, ``node`` and ``record``."""
