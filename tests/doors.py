"""Every reader of files that others may have written or edited, each with sound files and what it may answer."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from damaged import bounded_memory, files, no_hang
from machines import RECORDED
from made_weights import safetensors
from tunetool import record as records
from tunetool.advise.read_model import load_decoder, load_model
from tunetool.bench.dataset.corpus import measure_corpus
from tunetool.errors import TunetoolError
from tunetool.inspect.collect import inspect
from tunetool.inspect.model import dumps
from tunetool.inspect.source import opened
from tunetool.measure.fio import Fio, Job, parse
from tunetool.measure.worker import Failed
from tunetool.node.common import documents
from tunetool.node.common import manifest as manifests
from tunetool.node.common.manifest import ManifestError
from tunetool.node.common.refusal import Refusal
from tunetool.node.ephemeral import boot_decision
from tunetool.node.gds.cufile_check import check_config
from tunetool.node.gds.facts import read_gds_facts
from tunetool.node.machine import recording
from tunetool.node.machine.drive_health import Health
from tunetool.node.plan import plan_file
from tunetool.node.tuning.previous_values import Change, State
from tunetool.record import CheckResult, Confidence, Evidence, Expectation, Measurement, Node, Record, Verdict
from tunetool.report.inspection import screen
from tunetool.stage import manifest as stage_manifests
from tunetool.stage.tree import Entry
from tunetool.tune.settings import read_space, settings_of
from tunetool.tune.store import check_store

DATA = Path(__file__).parent / "data"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
REFUSALS = (
    TunetoolError,
    Failed,
    ManifestError,
    plan_file.PlanError,
    boot_decision.ConfigError,
    Refusal,
)
"""The exceptions by which tunetool refuses: each has one line with the thing in backticks, and a hint."""


@dataclass(frozen=True)
class Door:
    """A reader. ``sound``: files that it reads. ``signed``: whatever it returns is what was written, or it refuses, or
    ``unsigned`` says that nobody can know.

    ``seal``: what the writer of such a document does last. ``read`` gets the path of a file called ``name``.
    """

    sound: tuple[str, ...]
    read: Callable[[Path], Any]
    name: str = "file.json"
    seal: Callable[[Any], None] | None = None
    signed: bool = False
    unsigned: Callable[[Path], bool] = lambda _: False
    hinted: bool = True


def a_record(status: Any = "fail") -> Record:
    return Record(
        kind="verify",
        id="ab" * 16,
        started=NOW,
        finished=NOW,
        node=Node(host="n1", kernel="6.8", cpu_count=2, memory_bytes=2**34),
        command=["tunetool", "verify"],
        target="/mnt",
        expectations=[Expectation(name="sequential.read", value=6e9, source="--expect", status=status)],
        measurements=[
            Measurement(
                name=f"sequential.{direction}",
                figure="bandwidth",
                labels={"subject": "sequential", "direction": direction},
                layer="filesystem",
                engine="fio 3.33",
                medium="md RAID0 (8 x nvme)",
                quantity="bandwidth",
                unit="B/s",
                better="higher",
                value=5e9,
                samples=[5e9, 4.9e9, 5.1e9],
                confidence=Confidence(low=4.9e9, high=5.1e9, method="range of 3 samples"),
                percentiles={"p50": 1e-3},
                parameters={"direction": direction, "jobs": 16, "direct": True},
                evidence=Evidence(kind="block", device="md0", claimed_bytes=10, counted_bytes=10, ratio=1.0),
            )
            for direction in ("read", "write")
        ],
        checks=[CheckResult(id="array.state", status="fail", expected="clean", found="broken", remedy="see dmesg")],
        verdict=Verdict(status=status, reasons=["sequential read 5 GB/s is below 6 GB/s"]),
    )


def a_plan() -> dict[str, Any]:
    drive = {
        "serial": "S1",
        "model": "M",
        "size_bytes": 10,
        "action": "wipe",
        "reason": "r",
        "holds": [],
        "hash": "0" * 64,
    }
    other = {**drive, "serial": "S2", "action": "take", "hash": None}
    volume = {"uuid": "u", "hash": "1" * 64}
    part = {"drives": [drive, other], "array_action": "create", "array_reason": "4 drives", "volume": volume}
    return plan_file.document({"node1": part, "node2": {**part, "drives": []}}, "0.1.0", NOW)


def a_teardown() -> dict[str, Any]:
    part = {"drives": [], "array_action": "remove", "array_reason": "r", "volume": {"uuid": "u", "hash": "1" * 64}}
    return plan_file.document({"node1": part}, "0.1.0", NOW, plan_file.TEARDOWN)


def written(write: Callable[[Path], object]) -> str:
    """What ``write`` writes to the path that it is given."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        write(path)
        return path.read_text()


def a_manifest() -> str:
    document = json.loads((RECORDED / "built-manifest.json").read_text())
    document["expect"] = {"read": 1e9, "write": 9e8}
    return written(lambda path: manifests.write(document, str(path)))


def a_stage_manifest() -> str:
    entries = [
        Entry(".", "directory", 0o755, 0, 1, ""),
        Entry("a", "file", 0o644, 3, 1, ""),
        Entry("images", "link", 0o777, 1, 1, "a"),
    ]
    manifest = stage_manifests.Manifest("/src", 7, None, "2026-01-02", "xxh3_64", None, 3, entries, [["0" * 16]])
    return written(lambda path: stage_manifests.write(manifest, path))


def tuned() -> str:
    block = {"block_size": 2**20, "queue_depth": 32, "intra_op_parallelism": 4}
    block |= {"single_submit": False, "overlap_events": True, "use_gds": False}
    return json.dumps({"tunetool_tuned": {"0" * 64: {"block": block, "host": "n1", "mix": "read=1"}}})


def an_ephemeral_configuration() -> str:
    drives = {"model": "QEMU NVMe Ctrl", "size_bytes": 2**32, "transport": "pcie", "serials": []}
    offload = {"uid": 0, "gid": 0, "mode": "1777"}
    document = {"schema": boot_decision.SCHEMA_NAME, "drives": drives, "label": "l", "offload": offload}
    return boot_decision.dump({**document, "wait_seconds": 30})


def previous_values() -> str:
    return State("", {"scheduler[nvme0n1]": Change("mq-deadline", "none")}).text()


CUFILE = """{
  // as NVIDIA ships it
  "logging": {"level": "ERROR"},
  "properties": {"max_direct_io_size_kb": 16384, "allow_compat_mode": false, "rdma_dev_addr_list": ["192.0.2.1"]},
  "fs": {"lustre": {"posix_gds_min_kb": 0}}
}
"""
MODEL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
VISION = {
    **MODEL, "model_type": "qwen2_5_vl",
    "vision_config": {"hidden_size": 32, "depth": 2, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
}  # fmt: skip
EXPERTS = {
    **MODEL, "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "mlp_only_layers": [1],
}  # fmt: skip


def _plan_of(job: str) -> Callable[[Path], Any]:
    def read(path: Path) -> Any:
        plan = plan_file.load(str(path), job)
        for host in plan["hosts"]:
            plan_file.wipes(plan, host)
            plan_file.volume(plan, host)
        return plan

    return read


def _fio(path: Path) -> Any:
    outcome = parse(Fio("/usr/bin/fio", "3.33"), Job("read", 4, 2**26), path.read_text(errors="replace"))
    assert outcome.bandwidth > 0
    assert outcome.rate >= 0
    assert outcome.cores >= 0
    assert all(value >= 0 for value in outcome.percentiles.values())
    return outcome


def _cufile(path: Path) -> Any:
    for problem in check_config(path.read_text(errors="replace"), "1.15"):
        assert "\n" not in str(problem)
        assert problem.effect
    return None


def _space(path: Path) -> Any:
    assert settings_of(read_space(path))


def _index(path: Path) -> Any:
    for name, tensor in (("1.safetensors", "a"), ("2.safetensors", "b")):
        safetensors(path.parent / name, {tensor: [1]})
    return load_model(str(path))


def a_recording() -> str:
    document = json.loads((RECORDED / "built.json").read_text())
    # One drive and what is built on it: files and links as few as what is beside them.
    for kind in ("files", "links"):
        kept = {path: text for path, text in document[kind].items() if re.search(r"md127|nvme1|/proc/", path)}
        document[kind] = {path: text for path, text in kept.items() if not re.search(r"nvme[02-9]", path)}
    document["note"] = "made by hand"
    document["health"] = {"nvme1": vars(Health(0, 40, 100, 10, 3, 0, 0, 0, 0, 70))}
    document["space"] = {"/mnt/nvme_raid0": [2**40, 2**39]}
    with tempfile.TemporaryDirectory() as folder:
        recording.lay_out(document, folder)
        document["gds_facts"] = vars(read_gds_facts(folder, "/mnt/nvme_raid0"))
    return json.dumps(document)


def _recording(path: Path) -> None:
    with opened(path) as source:
        shown = inspect(source)
        assert "\x1b" not in screen(shown, True)
        dumps(shown)


def _seal_record(document: Any) -> None:
    document["sha256"] = documents.checksum(document)


def _seal_plan(document: Any) -> None:
    document["sha256"] = plan_file.seal(document)


def _state(path: Path) -> Any:
    state = State.load(str(path))
    state.text()
    return state


DOORS = {
    "recording": Door((a_recording(),), _recording),
    "record": Door((records.dumps(a_record()),), records.read, seal=_seal_record, signed=True),
    "plan": Door((plan_file.dump(a_plan()),), _plan_of(plan_file.PROVISION), seal=_seal_plan, signed=True),
    "plan of a teardown": Door(
        (plan_file.dump(a_teardown()),), _plan_of(plan_file.TEARDOWN), seal=_seal_plan, signed=True
    ),
    "manifest": Door(
        (a_manifest(),),
        lambda path: manifests.load(str(path)),
        signed=True,
        # `verify` says so.
        unsigned=lambda path: manifests.unsigned(str(path)),
    ),
    "manifest of a newer version": Door((a_manifest(),), lambda path: manifests.refuse_newer(str(path))),
    "manifest of a staged copy": Door((a_stage_manifest(),), stage_manifests.read, signed=True),
    "fio's result": Door(((DATA / "fio/read.json").read_text(),), _fio, hinted=False),
    "cufile.json": Door((json.dumps(json.loads(CUFILE.replace("// as NVIDIA ships it", ""))),), _cufile),
    "space of a search": Door(('{"block_size": ["1M", 8388608], "queue_depth": [32], "use_gds": [false]}',), _space),
    "stored results of a search": Door((tuned(),), lambda path: check_store(path.parent), "tunetool_tuned.json"),
    "configuration of ephemeral mode": Door(
        (an_ephemeral_configuration(),), lambda path: boot_decision.load(str(path))
    ),
    "a corpus": Door(
        (json.dumps({"id": 1, "text": "a text"}),), lambda path: measure_corpus(path, "text"), "corpus.jsonl"
    ),
    "I/O settings as they were": Door((previous_values(),), _state),
    "a model's configuration": Door(
        (json.dumps(MODEL), json.dumps(VISION), json.dumps(EXPERTS)), lambda path: load_model(str(path)), "config.json"
    ),
    "a decoder's configuration": Door((json.dumps(MODEL),), lambda path: load_decoder(str(path)), "config.json"),
    "an index of weights": Door(
        (json.dumps({"metadata": {}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}),),
        _index,
        "model.safetensors.index.json",
    ),
}


def refused_well(error: Exception, hinted: bool) -> None:
    """Assert that a refusal is one that people can read."""
    message, hint = getattr(error, "message", None) or str(error), getattr(error, "hint", None)
    assert "`" in message, message
    assert not hinted or hint or "hint: " in str(error), message
    assert message.isprintable(), ascii(message)
    f"{message} {hint}".encode()


def property_of(door: Door) -> Callable[[], None]:
    """A test by Hypothesis: whatever a file holds, its reader answers or refuses; a signed one never answers wrongly."""
    with tempfile.TemporaryDirectory() as folder:
        sound = [_answer(door, Path(folder, door.name), text.encode()) for text in door.sound]

    @given(st.sampled_from(door.sound).flatmap(lambda text: files(text, door.seal)))
    def holds(content: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder, no_hang(), bounded_memory():
            try:
                answer = _answer(door, Path(folder, door.name), content)
            except REFUSALS as error:
                refused_well(error, door.hinted)
                return
            if door.signed and not _sealed(door, content):
                taken = answer in sound or door.unsigned(Path(folder, door.name))
                assert taken, "it was changed, and its reader took it"

    return holds


def _answer(door: Door, path: Path, content: bytes) -> Any:
    path.write_bytes(content)
    return door.read(path)


def _sealed(door: Door, content: bytes) -> bool:
    """Whether the content is a document of another author, with a seal of its own."""
    if door.seal is None:
        return False
    try:
        document = json.loads(content)
        again = dict(document)
        door.seal(again)
    except (ValueError, TypeError, RecursionError):
        return False
    return bool(again == document)
