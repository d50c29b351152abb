"""`bench dataset` without torch: Megatron's format, broken corpora, token readers, figures, tables, page, wrong calls."""

from __future__ import annotations

import io
import json
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import builders
from shown_records import on_screen
from tunetool.bench.dataset import engines as known
from tunetool.bench.dataset import figures, files, fio_child, huge_pool, preflight, token_child
from tunetool.bench.dataset.corpus import measure_corpus, read_documents, write_made_corpus
from tunetool.bench.dataset.engines import (
    BatchEngine,
    DaliEngine,
    FioEngine,
    ImageEngine,
    RecordEngine,
    TokenEngine,
    engines,
    rows_with_workers,
)
from tunetool.bench.dataset.megatron import bytes_of_index, bytes_of_tokens, write_token_files
from tunetool.bench.dataset.request import Request
from tunetool.bench.dataset.run import plain_sum
from tunetool.bench.dataset.samples import EngineRow, Pass, StateTable
from tunetool.bench.dataset.view import view
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.evidence import Counted
from tunetool.measure.fio import Fio
from tunetool.measure.worker import Failed
from tunetool.node.machine.block_stack import read_stack
from tunetool.record import Record
from tunetool.report.kinds import write_any_page, write_page
from tunetool.verdict import judge
from tunetool.view.model import Table
from waiting import until

# Megatron's format, by a reader that shares nothing with the writer.


def read_by_hand(prefix: Path) -> list[bytes]:
    """The texts of the documents, as IndexedDataset finds them: one sequence is one document here."""
    index = io.BytesIO(prefix.with_name(prefix.name + ".idx").read_bytes())
    tokens = prefix.with_name(prefix.name + ".bin").read_bytes()

    def numbers(code: str, count: int) -> tuple[int, ...]:
        form = f"<{count}{code}"
        return struct.unpack(form, index.read(struct.calcsize(form)))

    assert index.read(9) == b"MMIDIDX\x00\x00"
    assert (*numbers("Q", 1), *numbers("B", 1)) == (1, 8), "version 1, uint16"
    sequences, documents = numbers("Q", 2)
    lengths, pointers, ends = numbers("i", sequences), numbers("q", sequences), numbers("q", documents)
    assert index.read() == b""
    assert ends == tuple(range(sequences + 1))
    assert sum(lengths) * 2 == len(tokens)
    texts = []
    for length, pointer in zip(lengths, pointers, strict=True):
        *content, last = struct.unpack_from(f"<{length}H", tokens, pointer)
        assert last == 256
        texts.append(bytes(content))
    return texts


@settings(max_examples=40)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=1, max_size=8), st.booleans())
def test_every_text_comes_back_from_the_token_files(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], ascii_alone: bool
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    corpus = folder / "corpus.jsonl"
    lines = [json.dumps({"id": 1, "text": text}, ensure_ascii=ascii_alone) for text in texts]
    corpus.write_text("\n".join(lines), encoding="utf-8", newline="\n")
    written = write_token_files(folder / "tokens", read_documents(corpus, "text"))
    encoded = [text.encode() for text in texts]
    assert read_by_hand(folder / "tokens") == encoded
    extent = measure_corpus(corpus, "text")
    assert (extent.documents, extent.text_bytes) == (len(texts), sum(map(len, encoded)))
    assert bytes_of_tokens(extent.documents, extent.text_bytes) == written.tokens_file.stat().st_size
    assert bytes_of_index(extent.documents) == written.index_file.stat().st_size


def test_the_files_of_two_documents_byte_by_byte(tmp_path: Path) -> None:
    written = write_token_files(tmp_path / "two", [b"ab", b""])
    assert written.tokens_file.read_bytes() == b"a\0b\0\0\1" + b"\0\1"
    assert written.index_file.read_bytes() == bytes.fromhex(
        "4d4d4944494458 0000"
        "0100000000000000 08 0200000000000000 0300000000000000"
        "03000000 01000000"
        "0000000000000000 0600000000000000"
        "0000000000000000 0100000000000000 0200000000000000"
    )


def test_a_made_corpus_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    extents = [write_made_corpus(tmp_path / f"{seed}-{again}", 20_000, seed) for seed in (0, 1) for again in (0, 1)]
    assert {extent.text_bytes for extent in extents} == {20_000}
    contents = [(tmp_path / name).read_bytes() for name in ("0-0", "0-1", "1-0")]
    assert contents[0] == contents[1] != contents[2]
    assert measure_corpus(tmp_path / "0-0", "text") == extents[0]


BROKEN = [
    (b"", "it is not JSON: Expecting value at column 1"),
    (b'{"text": "a"', "it is not JSON: "),
    (b"\xff", "it is not UTF-8 at byte 0"),
    (b"[" * 100_000, "it is nested too deeply"),
    (b'["text"]', "it is not a JSON object"),
    (b'{"body": "a"}', "it has no key `text`"),
    (b'{"text": ["a"]}', "the value of `text` is not a text"),
    (b'{"text": "\\ud800"}', "the value of `text` holds half a surrogate pair"),
]


@pytest.mark.parametrize(("line", "words"), BROKEN)
def test_a_broken_line_is_named(line: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good"}\n')
    with pytest.raises(UsageProblem) as caught:
        measure_corpus(path, "text")
    assert caught.value.message.startswith(f"`{path}` line 2: {words}")
    assert "mend this line or remove it" in str(caught.value.hint)


def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunetool.bench.dataset.corpus.LONGEST_LINE", 1 << 20)
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"text": "' + b"a" * (2 << 20))
    with pytest.raises(UsageProblem, match="line 1: it is longer than 1 MiB"):
        measure_corpus(path, "text")


# The engines that read tokens.


def ask(order: dict[str, Any]) -> dict[str, Any]:
    return token_child.answer(order)


@pytest.mark.parametrize("size", [1000, 4098, 8192])
def test_every_token_engine_gives_the_bytes_of_the_file(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_child, "_CEILING_SECONDS", 0.001)
    file = tmp_path / "tokens.bin"
    file.write_bytes(bytes(number * 7 % 251 for number in range(100_000)))
    count = 100_000 // size
    direct = [] if preflight.direct_obstacle(str(tmp_path)) else [engines((0,), False)["direct-shuffled"]]
    mapped = [each for each in engines((0,), False).values() if isinstance(each, TokenEngine) and not each.direct]
    for engine in [*mapped, *direct]:
        assert isinstance(engine, TokenEngine)
        how = {"order": engine.order, "advice": engine.advice, "direct": engine.direct, "opened": engine.opened}
        how = {**how, "threads": 3}
        started = ask(
            {"do": "start", "file": str(file), "engine": how, "sample_bytes": size, "count": count, "seed": 1}
        )
        assert "left_out" in started or started["ceiling"] > 0
        if "left_out" in started:
            assert engine.advice == "hugepage", "a kernel may be built without huge pages, not without the others"
            continue
        done = ask({"do": "pass", "seconds": 600})
        assert (done["samples"], done["bytes"]) == (count, count * size)
        checked = ask({"do": "check", "samples": done["samples"]})
        assert checked["sha256"] == plain_sum(file, checked["numbers"], size)
        file.write_bytes(bytes(100_000))
        assert ask({"do": "check", "samples": done["samples"]})["sha256"] == plain_sum(file, checked["numbers"], size)
        file.write_bytes(bytes(number * 7 % 251 for number in range(100_000)))


@settings(max_examples=20)
@given(st.integers(1, 500), st.integers())
def test_a_shuffled_order_has_each_sample_once(count: int, seed: int) -> None:
    assert sorted(token_child.draw_numbers(count, "shuffled", seed)) == list(range(count))
    assert list(token_child.draw_numbers(count, "sequential", seed)) == list(range(count))


def test_a_pass_ends_when_its_time_is_over(tmp_path: Path) -> None:
    file = tmp_path / "tokens.bin"
    file.write_bytes(bytes(100_000))
    how = {"order": "shuffled", "advice": "", "direct": False, "opened": False, "threads": 1}
    ask({"do": "start", "file": str(file), "engine": how, "sample_bytes": 10, "count": 10_000, "seed": 1})
    assert ask({"do": "pass", "seconds": -1})["samples"] == 1


# The pool of huge pages.


NODES = (0, 1)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 1000 huge pages of 2 MiB in memory that is available, and an empty pool over two NUMA nodes."""
    files = {
        "proc/meminfo": "MemAvailable:    2048000 kB\nHugepagesize:       2048 kB\n",
        "proc/sys/vm/nr_hugepages": "0\n",
        **{f"{pool_of_node(node)}/nr_hugepages": "0\n" for node in NODES},
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    return tmp_path


def pool_of_node(node: int) -> str:
    return f"sys/devices/system/node/node{node}/hugepages/hugepages-2048kB"


def pool_size(machine: Path) -> str:
    return (machine / "proc/sys/vm/nr_hugepages").read_text()


def test_the_pool_of_huge_pages_is_emptied_again(machine: Path) -> None:
    said: list[str] = []
    with huge_pool.huge_pool(12, said.append, str(machine)):
        assert pool_size(machine) == "12\n"
    assert pool_size(machine) == "0\n"
    with pytest.raises(KeyError), huge_pool.huge_pool(12, said.append, str(machine)):
        raise KeyError
    assert pool_size(machine) == "0\n"
    assert said == []


def test_a_pool_that_has_no_room_is_a_failure_and_put_back(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = huge_pool.resize
    monkeypatch.setattr(huge_pool, "resize", lambda setting, pages: plain(setting, min(3, pages)))
    with (
        pytest.raises(Failed, match="room for 3 huge pages in its pool, not for 12"),
        huge_pool.huge_pool(12, str, str(machine)),
    ):
        pass
    assert pool_size(machine) == "0\n"


def test_a_pool_that_is_not_empty_at_the_end_is_said(machine: Path) -> None:
    said: list[str] = []
    with huge_pool.huge_pool(12, said.append, str(machine)):
        # As where another program has mapped pages of it meanwhile.
        (machine / pool_of_node(1) / "nr_hugepages").write_text("2\n")
    assert said == [
        "the pool of huge pages was empty before and is not now (NUMA node 1: 2): `sysctl vm.nr_hugepages=0`"
    ]


@pytest.mark.parametrize("place", ["proc/sys/vm", *map(pool_of_node, NODES)])
def test_a_pool_with_pages_is_left_alone(place: str, machine: Path) -> None:
    assert huge_pool.obstacle(500, str(machine)) is None
    (machine / place / "nr_hugepages").write_text("3\n")
    assert "is in use (" in str(huge_pool.obstacle(500, str(machine)))


def test_a_pool_takes_half_of_the_available_memory_at_most(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "a pool of 501 huge pages takes 1002 MiB, more than half of the 1.953 GiB of memory that are available"
    assert huge_pool.too_large(500, str(machine)) is None
    assert huge_pool.obstacle(501, str(machine)) == huge_pool.too_large(501, str(machine)) == words
    monkeypatch.setattr(huge_pool, "too_large", lambda pages: words)
    with pytest.raises(UsageProblem, match="`--huge-pages 501`: a pool of 501 huge pages takes"):
        preflight.check_call(Request(target=tmp_path, huge_pages=501))


def test_the_pool_needs_root_and_a_kernel_that_has_one(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert huge_pool.obstacle(5, str(machine)) == "`vm.nr_hugepages` = 5 needs root on the node itself"
    (machine / "proc/meminfo").write_text("MemAvailable:    2048000 kB\n")
    assert huge_pool.obstacle(5, str(machine)) == "the kernel has no pool of huge pages"


def test_one_run_at_a_time_fills_the_pool(tmp_path: Path) -> None:
    environment = {"TUNETOOL_LOCK_DIR": str(tmp_path)}
    with huge_pool.pool_lock(environment), pytest.raises(CannotJudge, match="another tunetool run is measuring"):
        huge_pool.pool_lock(environment).__enter__()


def test_the_pool_is_put_back_after_sigkill(machine: Path) -> None:
    program = (
        "import os, signal, sys; from tunetool.bench.dataset.huge_pool import huge_pool\n"
        "with huge_pool(12, print, sys.argv[1]): os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(machine)], check=False)
    assert done.returncode == -signal.SIGKILL
    until(lambda: pool_size(machine) == "0\n", "the old value")


# Figures, verdict, table, page.

CONDITIONS: dict[str, Any] = {
    "sequence_length": 4096, "tokens": 10**9, "documents": 3, "images": 10, "image_side": 64,
    "threads": 16, "seconds": 4.0, "rounds": 6, "seed": 0,
}  # fmt: skip


def passes(seconds: float, **more: Any) -> dict[int, Pass]:
    """Six passes over 1000 samples of 8 kB, from the drives."""
    fixed = {"bytes": 8_192_000, "samples": 1000, "is_equal": True, "fetched": 8_192_000, "ceiling": 1e6, "cores": 0.2}
    one = Pass(seconds, **{**fixed, "counted": Counted(8_192_000, 8_192_000, {}), **more})
    return dict.fromkeys(range(1, 7), one)


def cold(tmp_path: Path) -> StateTable:
    stack = replace(read_stack(str(tmp_path)), medium="disk", in_memory=False, device="vda")
    table = StateTable("cold", stack)
    rows: list[tuple[Any, float]] = [
        (TokenEngine("mmap-shuffled", "shuffled"), 4.0),
        (TokenEngine("direct-shuffled", "shuffled", direct=True), 1.0),
        (ImageEngine("files", 0, 0), 3.0),
        (ImageEngine("tar", 0, 0), 3.0),
    ]
    table.rows = {engine.name: EngineRow(engine, passes=passes(seconds)) for engine, seconds in rows}
    return table


def record_of(*tables: StateTable) -> Record:
    case = figures.case(tables, CONDITIONS)
    return builders.record(
        *case.measurements, kind="bench.dataset", target="/mnt", checks=list(case.checks), verdict=judge(case)
    )


def shown(record: Record) -> str:
    return " ".join(on_screen(record, None, 200).split())


def test_figures_have_rates_bytes_and_ratios(tmp_path: Path) -> None:
    by_name = {each.name: each for each in record_of(cold(tmp_path)).measurements}
    assert by_name["dataset.cold.mmap-shuffled.samples"].value == pytest.approx(250)
    assert by_name["dataset.cold.direct-shuffled.read"].value == pytest.approx(8_192_000)
    assert by_name["dataset.cold.direct-shuffled.fetched"].value == 1
    versus = by_name["dataset.cold.direct-shuffled.versus_base"]
    assert (versus.value, versus.parameters["against"], versus.parameters["decided"]) == (4, "mmap-shuffled", True)
    assert by_name["dataset.cold.tar-0-workers.versus_base"].parameters["decided"] is False, "equally fast"
    assert "dataset.cold.mmap-shuffled.versus_base" not in by_name


def test_only_equal_samples_are_judged(tmp_path: Path) -> None:
    table = cold(tmp_path)
    doubts = figures.unproven_reasons(table)
    assert record_of(table).verdict.status == ("unproven" if doubts else "pass")  # type: ignore[union-attr]
    table.rows["direct-shuffled"].passes = passes(1.0, is_equal=False)
    verdict = record_of(table).verdict
    assert verdict is not None
    assert verdict.status == "fail"
    assert verdict.reasons[0] == "`direct-shuffled` from the drives gives other bytes than the files hold"


def test_cold_samples_that_no_drive_counted_prove_nothing(tmp_path: Path) -> None:
    table = cold(tmp_path)
    table.rows["mmap-shuffled"].passes = passes(4.0, counted=Counted(8_192_000, 80_000, {}))
    assert any("counted only 0.010" in reason for reason in figures.unproven_reasons(table))
    table.rows["mmap-shuffled"].passes = passes(4.0, fetched=80_000)
    (reason,) = [each for each in figures.unproven_reasons(table) if "mmap-shuffled" in each]
    assert "fetched 80 kB from the drives for 8.192 MB: the page cache had the rest" in reason, "others read meanwhile"


def test_warm_samples_that_came_from_drives_prove_nothing(tmp_path: Path) -> None:
    table = cold(tmp_path)
    table.state = "warm"
    for row in table.rows.values():
        row.passes = passes(1.0, counted=None, fetched=0)
    assert figures.unproven_reasons(table) == []
    table.rows["files-0-workers"].passes = passes(1.0, counted=None, fetched=600_000)
    assert figures.unproven_reasons(table) == [], "a page of a library"
    table.rows["mmap-shuffled"].passes = passes(1.0, counted=None, fetched=40_000_000)
    (reason,) = figures.unproven_reasons(table)
    assert "`mmap-shuffled` from the page cache fetched 40 MB from the drives for 8.192 MB" in reason
    table.rows["mmap-shuffled"].passes = passes(1.0, counted=None, fetched=None)
    (reason,) = figures.unproven_reasons(table)
    assert reason.startswith("`mmap-shuffled` from the page cache: the kernel does not count")


def test_a_table_and_a_page_end_with_one_sentence_of_advice(tmp_path: Path) -> None:
    table = cold(tmp_path)
    table.libraries = rows_with_workers((0, 2))
    table.rows["mmap-shuffled-hugepage"] = EngineRow(
        TokenEngine("mmap-shuffled-hugepage", "shuffled", "hugepage"), passes=passes(5.0, huge_bytes=2 << 20)
    )
    table.rows["direct-shuffled"].passes = passes(1.0, ceiling=1100.0)
    record = record_of(table)
    text = shown(record)
    (sentence,) = view(record).advice
    assert sentence == (
        "advice: read shuffled tokens of a corpus larger than memory by `direct-shuffled` (1000 samples/s, 0.00819 GB/s), 4.00 times `mmap-shuffled`; "
        "read images by `files-0-workers` or `tar-0-workers`, between which these rounds do not decide."
    )
    assert "advice: read shuffled tokens of a corpus larger than memory by `direct-shuffled`" in text
    assert (
        "direct-shuffled: the generator is the bottleneck: 0.008192 GB/s (0.007629 GiB/s) is near the tester's limit"
        in text
    )
    assert "mmap-shuffled: the generator" not in text
    assert "mapped by huge pages at the end of a pass: mmap-shuffled-hugepage 2.097 MB" in text
    assert "kvikio-2-workers: left out, GPUDirect Storage with num_workers=2" in text
    page = write_any_page(record, tmp_path / "record.json")
    assert "read shuffled tokens of a corpus larger than memory by <code>direct-shuffled</code>" in page.read_text()
    assert write_page(builders.record(kind="bench.dataset"), tmp_path / "none.json") is None


def test_passes_before_the_page_cache_answered_are_named(tmp_path: Path) -> None:
    table = cold(tmp_path)
    assert "ended before the time" not in shown(record_of(table))
    table.rows["mmap-shuffled"].passes = passes(4.0, ended_by_read_ahead=True)
    text = shown(record_of(table))
    assert "ended before the time was over: mmap-shuffled after 1000 samples. The kernel had read ahead 10% of" in text


def test_images_by_dali_are_compared_with_the_most_workers(tmp_path: Path) -> None:
    table = cold(tmp_path)
    dali = engines((0, 2), False)["dali"]
    table.rows = {
        "files-2-workers": EngineRow(ImageEngine("files", 2, 0), passes=passes(3.0)),
        "dali": EngineRow(dali, passes=passes(1.0), facts={"cpus": 2, "dali": "2.4.0", "device": "cpu"}),
    }
    record = record_of(table)
    assert view(record).advice == [
        "advice: read images by `dali` (1000 samples/s, 0.00819 GB/s), 3.00 times `files-2-workers`."
    ]
    assert "images: " in shown(record)


def test_options_of_tf_data_are_compared_with_its_defaults(tmp_path: Path) -> None:
    table, facts = cold(tmp_path), {"cpus": 2, "tensorflow": "2.21.0"}
    table.rows = {
        "tf-data": EngineRow(RecordEngine("tf-data", "mmap-sequential"), passes=passes(1.0), facts=facts),
        "tf-data-interleaved": EngineRow(
            RecordEngine("tf-data-interleaved", "tf-data"), passes=passes(4.0), facts=facts
        ),
    }
    record = record_of(table)
    versus = next(each for each in record.measurements if each.name.endswith("interleaved.versus_base"))
    assert (versus.value, versus.parameters["against"], versus.parameters["tensorflow"]) == (0.25, "tf-data", "2.21.0")
    assert view(record).advice == [
        "advice: read TFRecords by `tf-data` (1000 samples/s, 0.00819 GB/s), 4.00 times `tf-data-interleaved`."
    ]


@given(st.integers(1, 10**7), st.integers(1, 10**7))
def test_every_record_shard_has_a_record(samples: int, size: int) -> None:
    shards = files.record_shards(samples, size)
    assert 1 <= shards <= samples
    assert shards == samples or -(-samples // shards) * size <= files.RECORD_SHARD_BYTES + 2 * size


def test_few_rounds_and_slower_rivals_are_said_so(tmp_path: Path) -> None:
    table = cold(tmp_path)
    table.rows["direct-shuffled"].passes = passes(8.0)
    (sentence,) = view(record_of(table)).advice
    assert sentence.startswith(
        "advice: read shuffled tokens of a corpus larger than memory by `mmap-shuffled` (250 samples/s, "
    )
    for row in table.rows.values():
        row.passes = {number: row.passes[number] for number in (1, 2, 3, 4)}
    (sentence,) = view(record_of(table)).advice
    assert "these rounds do not decide" in sentence, "four rounds are too few"
    table.rows = {name: row for name, row in table.rows.items() if name == "mmap-shuffled"}
    assert "too little was measured" in view(record_of(table)).advice[0]


def test_what_is_left_out_or_failed_has_its_reason(tmp_path: Path) -> None:
    table = cold(tmp_path)
    table.rows["tar-0-workers"] = EngineRow(ImageEngine("tar", 0, 0), left_out="not installed: pip install torch")
    table.rows["files-0-workers"] = EngineRow(
        ImageEngine("files", 0, 0), failed="`files-0-workers` was ended by SIGKILL"
    )
    record = record_of(table)
    assert "tar-0-workers: left out, not installed: pip install torch" in shown(record)
    assert record.verdict is not None
    assert any("`files-0-workers` from the drives could not be measured" in reason for reason in record.verdict.reasons)


def test_gpudirect_with_workers_and_libraries_have_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_is_there", lambda module: False)
    rows = rows_with_workers((0, 4))
    assert list(rows) == ["gpu-direct-4-workers", "kvikio-4-workers"]
    assert "use num_workers=0" in rows["kvikio-4-workers"]
    tf_data, dali = RecordEngine("tf-data", ""), DaliEngine("")
    assert tf_data.missing() == f"not installed: {sys.executable} -m pip install tensorflow"
    assert dali.missing("cpu") == f"not installed: {sys.executable} -m pip install nvidia-dali-cuda120"
    assert known.missing_for_images() == f"not installed: {sys.executable} -m pip install torch pillow numpy"
    kvikio, ours = BatchEngine("kvikio"), BatchEngine("gpu-direct")
    assert kvikio.missing("auto") == ours.missing("auto") == f"not installed: {sys.executable} -m pip install torch"
    monkeypatch.setattr(known, "_is_there", lambda module: module != "kvikio")
    assert kvikio.missing("auto") == f"not installed: {sys.executable} -m pip install kvikio-cu12"
    monkeypatch.setattr(known, "_is_there", lambda module: True)
    monkeypatch.setattr(known, "device_nodes", lambda pattern: [])
    assert kvikio.missing("auto") == dali.missing("cuda") == "it needs a GPU"
    assert kvikio.missing("cpu") == "it reads into a GPU, not to `--device cpu`"
    assert ours.missing("cuda") == "it needs a GPU; `--device cpu` reads into the host's memory"
    assert ours.missing("cpu") is dali.missing("auto") is tf_data.missing() is None
    monkeypatch.setattr(known, "device_nodes", lambda pattern: ["/dev/nvidia0"])
    assert kvikio.missing("auto") is ours.missing("auto") is dali.missing("cuda") is None
    assert known.missing_for_images() is None


@pytest.mark.parametrize(
    ("patterns", "chosen", "left_out"),
    [
        (("*",), 8 + 2 + 3 + 2 + 4 + 1, ["gpu-direct-2-workers", "kvikio-2-workers"]),
        (("mmap-shuffled*",), 4, []),
        (("tf-data*", "dali"), 3, []),
        (("tar-*", "kvikio"), 3, ["kvikio-2-workers"]),
        (("gpu-direct", "fio"), 2, ["gpu-direct-2-workers"]),
    ],
)
def test_engines_are_chosen_by_name(
    patterns: tuple[str, ...], chosen: int, left_out: list[str], tmp_path: Path
) -> None:
    request = Request(target=tmp_path, engines=patterns)
    assert len(preflight.chosen(request)) == chosen
    assert list(preflight.libraries(request, rows_with_workers(request.workers))) == left_out


def test_a_pool_of_huge_pages_is_one_more_engine_for_each_order() -> None:
    more = set(engines((0,), True)) - set(engines((0,), False))
    assert more == {"mmap-sequential-nr-hugepages", "mmap-shuffled-nr-hugepages"}


def test_a_target_in_memory_is_never_cold() -> None:
    with pytest.raises(UsageProblem, match="`/dev/shm` with `--states cold,warm` has nothing to read"):
        preflight.check_call(Request(target=Path("/dev/shm"), engines=("direct-shuffled",)))
    preflight.check_call(Request(target=Path("/dev/shm"), engines=("direct-shuffled", "mmap-shuffled")))
    assert preflight.states(Request(target=Path("/dev/shm")), read_stack("/dev/shm")) == ["warm"]


def test_figures_from_a_tmpfs_are_not_of_the_page_cache(tmp_path: Path) -> None:
    table = cold(tmp_path)
    table.state, table.stack = "warm", replace(table.stack, in_memory=True, medium="tmpfs")
    for row in table.rows.values():
        row.passes = passes(1.0, counted=None, fetched=0)
    record = record_of(table)
    assert {each.medium for each in record.measurements} == {"tmpfs"}
    assert "warm: from tmpfs" in shown(record)
    table.rows["mmap-shuffled"].passes = passes(1.0, counted=None, fetched=None)
    assert figures.unproven_reasons(table)[0].startswith("`mmap-shuffled` from tmpfs: the kernel does not count")


def test_fio_hands_no_bytes_out_and_is_not_judged(tmp_path: Path) -> None:
    table = cold(tmp_path)
    table.rows["fio"] = EngineRow(FioEngine(), passes=passes(1.0, is_equal=None), facts={"fio": "3.33"})
    table.rows["gpu-direct"] = EngineRow(
        BatchEngine("gpu-direct"), passes=passes(2.0), facts={"device": "cuda", "way": "host memory"}
    )
    record = record_of(table)
    checks = {check.id: (check.status, check.found) for check in record.checks}
    assert checks["dataset.cold.fio"] == ("skip", "measured in 6 rounds; it hands no bytes out")
    assert checks["dataset.cold.gpu-direct"] == ("pass", "equal in 6 rounds")
    by_name = {each.name: each for each in record.measurements}
    assert by_name["dataset.cold.gpu-direct.read"].parameters["way"] == "host memory"
    assert by_name["dataset.cold.fio.read"].parameters["read_threads"] == 16
    (table_of_state,) = [each for each in view(record).sections[0].blocks if isinstance(each, Table)]
    assert [row[-1] for row in table_of_state.rows if row[0] == "fio"] == ["-"]
    assert "fio: left out" not in shown(record)


@pytest.mark.parametrize(
    ("state", "call"),
    [
        ("cold", ["--ioengine=libaio", "--iodepth=16", "--direct=1", "--numjobs=4", "--io_size=10240000"]),
        ("warm", ["--ioengine=psync", "--direct=0", "--numjobs=8", "--io_size=5120000", "--invalidate=0"]),
    ],
)
def test_fio_reads_as_many_bytes_as_the_file_has(state: str, call: list[str]) -> None:
    order = {"state": state, "threads": 8, "sample_bytes": 4096, "count": 10_000, "seed": 3, "file": "/a:b/tokens.bin"}
    argv = fio_child.command(Fio("/usr/bin/fio", "3.33"), order, 4.0)
    assert {*call, "--bs=4096", "--rw=randread", "--runtime=4000ms", "--filename=/a\\:b/tokens.bin"} <= {*argv}
