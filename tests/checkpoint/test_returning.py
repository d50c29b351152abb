"""A program that ends during an async save keeps that checkpoint: Python waits for the thread that saves."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from returning import begin_saves, run_to_its_end

Ask = Callable[..., Any]
SEED, MEGABYTES = 5, 6.0


@pytest.mark.parametrize("process", ["program", "fork", "spawn"])
def test_a_main_that_returns_during_a_save_keeps_the_checkpoint(
    process: str, forks: Ask, only_torch: Ask, tmp_path: Path
) -> None:
    given = {"path": str(tmp_path), "seed": SEED, "megabytes": MEGABYTES}
    if process == "spawn":
        run_to_its_end(multiprocessing.get_context("spawn").Process(target=begin_saves, args=(0, 1), kwargs=given))
    else:
        order = {**given, "child": process == "fork"}
        assert [answer["status"] for answer in forks(do="begin_saves", world=1, exit=True, **{"with": order})] == [0]
    names = ["copied", "whole"]
    assert [name for name in names if (tmp_path / name / ".metadata").exists()] == names
    for name in names:
        loaded = only_torch(do="load", path=str(tmp_path / name), seed=SEED, megabytes=MEGABYTES)
        assert loaded == {"difference": None}, name
