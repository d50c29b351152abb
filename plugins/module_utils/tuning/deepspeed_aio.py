# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""DeepSpeed's aio block from `tunetool tune`, for nodes with the same hardware as the tuned one."""

from __future__ import annotations

import json
from typing import Any, Mapping

from ..common.check_result import FAIL, PASS, UNKNOWN, Check
from ..common.files import read_text
from ..common.refusal import Expected, on_one_line
from ..machine.block_stack import read_stack
from ..machine.drives import read_drives
from ..machine.hardware_hash import hardware, hardware_changes, hardware_hash

TUNED_PATH = "/etc/tunetool/aio.json"
VARIABLE = "tunetool_tuned"
CHECK_ID = "deepspeed.tuned"
KEYS: Mapping[str, type] = {
    "block_size": int,
    "queue_depth": int,
    "intra_op_parallelism": int,
    "single_submit": bool,
    "overlap_events": bool,
    "use_gds": bool,
}
"""Types by key; DeepSpeed itself ignores an unknown key, and takes any text as true."""


class TunedError(Expected):
    """The variable has a value that DeepSpeed would not accept. ``hint`` says what to do."""

    def __init__(self, message: str, hint: str) -> None:
        self.message, self.hint = on_one_line(message), on_one_line(hint)
        super().__init__(self.message)


def facts_of(mount_point: str, root: str = "/") -> dict[str, Any]:
    """The hardware of this node, with the file system that is mounted at ``mount_point``."""
    return hardware(read_drives(root), read_stack(mount_point, root), root)


def choose(tuned: Mapping[str, Any], mount_point: str, root: str = "/") -> dict[str, Any] | None:
    """The block for this node as in the manifest; None if nothing was tuned on such hardware.

    Raises ``TunedError``.
    """
    check_variable(tuned)
    facts = facts_of(mount_point, root)
    entry = tuned.get(hardware_hash(facts))
    if entry is None:
        return None
    return {"path": TUNED_PATH, "block": {name: entry["block"][name] for name in KEYS}, "hardware": facts}


def check_variable(tuned: Mapping[str, Any]) -> None:
    """Raises ``TunedError`` for a block that DeepSpeed would not read as it is written."""
    for name, entry in tuned.items():
        problem = _problem(entry)
        if problem:
            raise TunedError(
                "`%s` of `%s` %s" % (VARIABLE, name, problem), "let `tunetool tune --store-vars DIR` write it"
            )


def render(block: Mapping[str, Any]) -> str:
    """The file's text: it can be merged into a ds_config as it is."""
    return json.dumps({"aio": dict(block)}, indent=2) + "\n"


def check_tuned(wanted: Mapping[str, Any], mount_point: str, root: str = "/") -> Check:
    """Check that the block is in its file, and that the node still has the hardware that it was tuned on."""
    expected = "`%s` as tuned on hardware like this" % wanted["path"]
    text = read_text(root.rstrip("/") + wanted["path"])
    if text is None:
        return Check(CHECK_ID, FAIL, expected, "the file is missing", "run `tunetool provision`")
    try:
        same = json.loads(text) == {"aio": wanted["block"]}
    except ValueError:
        same = False
    if not same:
        return Check(CHECK_ID, FAIL, expected, "the file holds something else", "run `tunetool provision`")
    try:
        changes = hardware_changes(wanted["hardware"], facts_of(mount_point, root))
    except OSError as error:
        return Check(CHECK_ID, UNKNOWN, expected, "the hardware cannot be read: %s" % error.strerror, "see `dmesg`")
    if changes:
        return Check(
            CHECK_ID,
            FAIL,
            expected,
            "tuned on other hardware: %s" % "; ".join(changes),
            "run `tunetool tune --store-vars` on this node, then `tunetool provision`",
        )
    return Check(CHECK_ID, PASS, expected, "as tuned")


def _problem(entry: Any) -> str | None:
    block = entry.get("block") if isinstance(entry, dict) else None
    if not isinstance(block, dict):
        return "has no block"
    if set(block) != set(KEYS):
        return "has the keys %s, not %s" % (", ".join(sorted(block)), ", ".join(sorted(KEYS)))
    for name, kind in KEYS.items():
        if type(block[name]) is not kind:
            return "has %s as %s" % (name, json.dumps(block[name]))
    return None
