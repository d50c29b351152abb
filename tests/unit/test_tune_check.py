"""Keys that count as understood by DeepSpeed: not those that it leaves out or changes."""

from __future__ import annotations

from typing import Any

import pytest

from tunetool.advise.ds_config import KINDS
from tunetool.cli import ds_config
from tunetool.tune.check import count_keys, differences

WRITTEN = {
    "train_batch_size": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    "aio": {"queue_depth": 8, "single_submit": False},
}


def parsed(**changes: Any) -> dict[str, Any]:
    """DeepSpeed's answer, which has more keys than were written."""
    return {
        "train_batch_size": 16,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "adamw", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
        "aio": {"queue_depth": 8, "single_submit": False, "use_gds": False, **changes},
    }


def test_what_came_back_as_written_is_understood() -> None:
    assert differences(WRITTEN, parsed()) == []
    assert count_keys(WRITTEN) == 6


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("queue_depth", 1, "`aio.queue_depth` is 8 in the file and became 1"),
        ("queue_depth", "8", "`aio.queue_depth` is 8 in the file and became '8'"),
        ("single_submit", 0, "`aio.single_submit` is False in the file and became 0"),
        ("single_submit", "false", "`aio.single_submit` is False in the file and became 'false'"),
        ("single_submit", None, "`aio.single_submit` is False in the file and became None"),
    ],
)
def test_what_became_something_else_is_named(key: str, value: object, message: str) -> None:
    assert differences(WRITTEN, parsed(**{key: value})) == [message]


def test_what_is_ignored_is_named() -> None:
    asked = {**WRITTEN, "aio": {**WRITTEN["aio"], "thread_count": 8}, "aio_": {}}
    assert differences(asked, parsed()) == ["`aio.thread_count` is ignored", "`aio_` is ignored"]
    assert differences({"aio": {"queue_depth": 8}}, {"aio": None}) == ["`aio` became None"]
    assert differences({"betas": [1, 2]}, {"betas": [1, 3]}) == ["`betas` is [1, 2] in the file and became [1, 3]"]


def test_the_command_offers_the_kinds_that_there_are() -> None:
    assert sorted(ds_config.KINDS) == sorted(KINDS)
