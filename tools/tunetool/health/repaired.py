"""For a person who has repaired what the kernel's log told of: it counts no more, and the next check passes."""

from __future__ import annotations

from tunetool.health import results
from tunetool.node.health import kernel_check


def main(files: results.Files = results.NODE) -> int:
    """Forget the faults until now."""
    kept = dict(results.read_document(files.kept))
    kept["kernel"] = kernel_check.repaired(kept.get("kernel") or {})
    results.write_document(files.kept, kept, sync=True)
    print("what the kernel has logged until now counts no more. hint: `systemctl start tunetool-health` checks again")
    return 0
