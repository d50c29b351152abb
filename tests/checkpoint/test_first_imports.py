"""What a process imports for its first load, save and restore. On an H200 machine our modules were 30 ms of a first
load of 350 ms; they are listed here, since a limit in milliseconds would depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

import pytest

from waiting import PATIENCE

SHELL = """
import json, os, sys, tempfile
import torch

def imported(work):
    before, (here, there) = set(sys.modules), os.pipe()
    if os.fork():
        os.close(there)
        return json.loads(open(here).read())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        work(path)
    os.write(there, json.dumps(sorted(set(sys.modules) - before)).encode())
    os._exit(0)

def loading(path):
    header = json.dumps({"t": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    with open(path + "/model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + bytes(4))
    from tunetool.loading import load
    assert load(path)["t"].tolist() == [0] * 4

new = {"loading": imported(loading)}
from torch.distributed.checkpoint import load as restore, save
STATE = {"t": torch.ones(4)}

def saving(path):
    from tunetool.checkpoint import DirectSavePlanner, DirectWriter
    save(STATE, storage_writer=DirectWriter(path + "/step-1"), planner=DirectSavePlanner(), no_dist=True)

def restoring(path):
    from tunetool.checkpoint import DirectReader
    restore(STATE, storage_reader=DirectReader(saved), no_dist=True)

new["saving"] = imported(saving)
with tempfile.TemporaryDirectory(dir="/dev/shm") as saved:
    save(STATE, checkpoint_id=saved, no_dist=True)
    new["restoring"] = imported(restoring)
print(json.dumps(new))
"""
HOST_MEMORY = {"node.machine", "node.machine.memory", "node.machine.mounts"}
"""Modules that say how much memory the host has left."""
OF_FILES = {"node.common.files", "node.common.temporary", "node.common.file_lock", "node.common.waiting"}
"""Modules that the reader of the host's files brings along."""
READING = {
    "checkpoint",
    "checkpoint.checksums",
    "checkpoint.compiled",
    "checkpoint.fetch",
    "checkpoint.host_buffers",
    "checkpoint.memory_file_system",
    "checkpoint.os_errors",
    "checkpoint.raw_bytes",
    "checkpoint.read_loop",
    "checkpoint.regions",
    "checkpoint.source",
    "checkpoint.workers",
    "errors",
    "lazy_names",
    "node",
    "node.common",
    "node.common.documents",
    "node.common.refusal",
    "regular_files",
}


@pytest.fixture(scope="module")
def imported() -> Mapping[str, frozenset[str]]:
    """By the work of a process that had imported torch alone: the modules that it imported for it."""
    command = [sys.executable, "-W", "ignore", "-c", SHELL]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE)
    return {work: frozenset(names) for work, names in json.loads(done.stdout).items()}


def ours(names: frozenset[str]) -> set[str]:
    return {name.removeprefix("tunetool.") for name in names if name.startswith("tunetool.")}


def test_a_first_load(imported: Mapping[str, frozenset[str]]) -> None:
    # On the CPU the memory is counted in which the tensors are made; a GPU's is known to the driver.
    assert ours(imported["loading"]) - HOST_MEMORY - OF_FILES == READING | {
        "checkpoint.collections_off",
        "checkpoint.identity",
        "loading",
        "loading.device_memory",
        "loading.fill",
        "loading.safetensors_files",
        "loading.wanted",
        "loading.weights",
        "measure",
        "measure.process_reads",
        "node.units",
        "safetensors_header",
    }


def test_a_first_restore(imported: Mapping[str, frozenset[str]]) -> None:
    names = {
        "archive",
        "collections_off",
        "columns",
        "global_plan",
        "holders",
        "index",
        "items",
        "load_planner",
        "load_targets",
        "metadata",
        "metadata_opcodes",
        "metadata_pickle",
        "metadata_rows",
        "packed",
        "pickled",
        "plain",
        "reader",
        "state_shape",
        "sums_table",
        "tensor_table",
        "vocabulary",
    }
    # Ctrl-C leaves no lock of its threads taken.
    waiting = {"ctrl_c", "node.common.waiting"}
    assert ours(imported["restoring"]) == READING | waiting | {f"checkpoint.{name}" for name in names}


def test_a_first_save(imported: Mapping[str, frozenset[str]]) -> None:
    names = ours(imported["saving"])
    assert "checkpoint.writer" in names
    # What restores, drains and looks for block devices, and the line that installs what is missing.
    restoring = {"archive", "fetch", "index", "reader", "regions", "source"}
    draining = {"draining", "drain_worker", "retention", "resume", "transfer"}
    assert not names & {f"checkpoint.{name}" for name in restoring | draining}
    assert not names & {"node.machine.block_stack", "origin"}


@pytest.mark.parametrize("work", ["loading", "saving", "restoring"])
def test_no_other_library_is_imported(imported: Mapping[str, frozenset[str]], work: str) -> None:
    """Neither one of the Python package index nor a further part of torch; but for the checksum of `.metadata`."""
    others = {name for name in imported[work] - sys.stdlib_module_names if name.partition(".")[0] != "tunetool"}
    assert {name.partition(".")[0] for name in others} == ({"xxhash"} if work == "saving" else set())
