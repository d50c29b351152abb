"""What every command promises of a wrong call: one line that says what is wrong, a hint, exit code 2, nothing changed.

A case is a row: the options, and words of the answer. Unknown options and values that an option's type does not take
need no row for a benchmark: tests/unit/test_benchmark_contract.py makes those.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from refusals import Refusals
from tunetool import training_python
from tunetool.bench import media
from tunetool.bench.dataset import preflight as dataset
from tunetool.bench.drives import preflight as drives
from tunetool.bench.experts import preflight as experts
from tunetool.bench.kv_cache import run as kv_cache
from tunetool.lab import programs
from tunetool.node.machine.block_stack import BlockStack, Leaf, read_stack
from tunetool.verify import run as verify

FILES: Mapping[str, str] = {
    "file": "not an inventory, not a manifest",
    "full/theirs": "keep",
    "empty.jsonl": "",
    "broken.jsonl": '{"text": "a"}\nthe second line\n',
    "text.json": "no json",
    "list.json": "[]",
    "bare.json": "{}",
    "newer.json": '{"schema": "tunetool.recording/2"}',
    "out.json": '{"files": {"/../x": ""}, "links": {}}',
    "gpt2/config.json": '{"model_type": "gpt2"}',
    "llama/config.json": '{"model_type": "llama"}',
    "gds.json": json.dumps(
        {
            "aio": {
                "block_size": 2**21,
                "queue_depth": 64,
                "intra_op_parallelism": 3,
                "single_submit": False,
                "overlap_events": True,
                "use_gds": True,
            }
        }
    ),
    "other/constraints.txt": "",
    "other/pyproject.toml": "dependencies = []\n",
}
"""Beside these, the directory of a call has an empty one, `empty`, and the link `dangling`."""
EXAMPLE = "--bandwidth 10GBps --samples-per-second 100 --rework 0.5h"
SHARED = f"--model-size 140GB {EXAMPLE} --shared 1GBps"
IO = "--size 1MiB --target full"
DRIVE = "--target full --virtual 2"
OFFLOAD = "--model tiny --target full"

WRONG: Mapping[str, Mapping[str, str | tuple[str, ...]]] = {
    "": {
        "veryfi": ("`tunetool veryfi` is not a command", "did you mean `verify`?"),
        "xyz": ("`tunetool xyz` is not a command", "tunetool has: inspect, "),
        # Words of older versions.
        "plan checkpoint": "is not a command",
        "prebuild": "is not a command",
        "rebuild": "is not a command",
        "tune --ds-config zero3 --target x": "is not an option",
        "stage copy --verify x y": "is not an option",
        "bench staging --memory /dev/shm": "is not an option",
        "bench finetune --batch-size 2": "is not an option",
        "provision -i x --batch 1": "is not an option",
        "stage --threads 2 verify copy": "`verify` must be the first word after `stage`",
        "stage copy /a /b c": "unexpected extra argument",
        "bench checkpiont": ("`tunetool bench checkpiont` is not a command", "did you mean `checkpoint`?"),
    },
    "doctor": {
        "verfy": ("error: `tunetool verfy` is not a command\n", "hint: did you mean `verify`?\n"),
        "bench chekpoint": ("error: `tunetool chekpoint` is not a command\n", "hint: did you mean `checkpoint`?\n"),
        "verify tune": ("error: `verify` has no command `tune`\n", "hint: name one command\n"),
    },
    "init": {
        "full": "error: `full` exists\n",
        "file": "error: `file` exists\n",
        "dangling": "error: `dangling` exists\n",
        "file/b": ("error: `file` is not a directory\n", "hint: name another place; nothing was written\n"),
        "file/b/c": ("error: `file/b` is not a directory\n", "hint: name another place; nothing was written\n"),
    },
    "provision -i x --hosts-per-batch": {
        "0": "neither a number of hosts",
        "ten": "neither a number of hosts",
        "101%": "neither a number of hosts",
        "1,,2": "neither a number of hosts",
        "''": "neither a number of hosts",
    },
    "tune": {
        "": ("`--target` is missing", "see `tunetool tune --help`"),
        "--target ''": ("`--target` is empty", "give a path"),
        "--target x --json /": ("`/` is a directory", "`--json` takes a file"),
    },
    "verify": {
        "--tolerence 3%": ("`--tolerence` is not an option", "did you mean `--tolerance`?"),
        "'--no\n\x1b[2J'": ("`--no\\n\\x1b[2J` is not an option", "see `tunetool verify --help`"),
        "--expect banana": "`banana` is not a quantity",
        "--expect 50": "`50` has no unit",
        "--expect 50Gbps": "in bits",
        "--expect 50gbps": "in bits",
        "--expect -5GBps": "`-5GBps` is not a quantity",
        "--expect 0GBps": "`0GBps` is not above zero",
        "--expect read=-5GBps": "`-5GBps` is not a quantity",
        "--expect ''": "`` is not a quantity",
        f"--expect {'9' * 400}GBps": "`99999999999999999999` is too large",
        "--expect sideways=5GBps": "`sideways` is not a direction",
        "--expect randread-4k=5MIOPS --target full": "only `--level full` measures `randread-4k`",
        "--expect randread-4k=5GBps --target full --level full": "`5GBps` is not a rate of requests",
        "--expect 5GBps --expect read=6GBps": "`--expect read=6GBps` gives the read twice",
        "--expect write=5GBps,write=6GBps": "`--expect write=6GBps` gives the write twice",
        "--expect 1GBps --target missing": "`missing` does not exist",
        "--expect 1GBps --target file": "`file` is not a directory",
        "--expect 1GBps --target ''": "`--target` is empty",
        "--expect 1GBps": "nothing to measure: there is no manifest and no `--target`",
        "--target full --duration 10": "`10` is not a duration",
        "--target full --duration 0s": "`0s` is not a duration between 1 s and 3600 s",
        "--target full --duration banana": "`banana` is not a duration",
        "--target full --level banana": "'banana' is not one of",
        "--target full --manifest missing": "`missing` does not exist",
        "--target full --manifest file": "`file` is not JSON",
        "--target full --json missing/record.json": "`missing/record.json` cannot be written",
        "--target full --json full": "`full` is a directory",
        "--target full --limit n1": "`--limit` needs an inventory",
        "--target full --forks 2": "`--forks` needs an inventory",
        "-i missing": "`missing` does not exist",
        "-i file --manifest file": "`--manifest` and `-i` do not go together",
        "-i file --forks 0": "`--forks`: 0 is not",
        "--target full banana": "unexpected extra argument (banana)",
        "-i file x": "unexpected extra argument",
        "x -- y": "unexpected extra argument",
        "-- -K": "error: what follows `--` is for Ansible, and there is no inventory\n",
        # The configuration alone proves nothing.
        "--level config --gds require": "contradict each other",
        "--level config --gds auto": "contradict each other",
    },
    "inspect": {
        "--root nowhere": "`nowhere` does not exist",
        "--root empty": "`empty` is not a recording: it has neither `proc` nor `sys`",
        "--root text.json": "`text.json` is not a recording",
        "--root list.json": "`list.json` is not a recording",
        "--root bare.json": "`bare.json` is not a recording",
        "--root newer.json": "`newer.json` is not a recording of `tunetool.recording/1`",
        "--root out.json": "leads out of the recording",
        "--root ''": "`--root` is empty",
        "--capture full": "`full` is not empty",
        "--capture text.json": "`text.json` exists",
        "--capture a/b": "`a` is not a directory",
        "--capture new --json -": "`--capture` shows nothing",
        "--anonymous": "`--anonymous` needs `--capture`",
        "--json empty": "`empty` is a directory",
        "--limit n1": "`--limit`",
        "--page /nowhere/x.html": "`/nowhere/x.html`",
        "-i hosts --gds": "`--gds` and `-i`",
        "-i hosts --root x": "`--root` and `-i`",
        "-i hosts --page /nowhere/x.html": "`/nowhere/x.html`",
        "-i nowhere": "`nowhere`",
    },
    "build-wheelhouse new --source other": {
        "--build cuda": "`--build cuda` is not a build of torch",
        "--python-version 3.9": "`--python-version 3.9` is not 3.10 or newer",
        "--source /nowhere": "`/nowhere` is not a copy of the collection",
        "": "pyproject.toml has no `deepspeed`",
    },
    "checkpoint": {
        "lst": ("`tunetool checkpoint lst` is not a command", "did you mean `ls`?"),
        "copy": (
            "`tunetool checkpoint copy` is not a command",
            "tunetool checkpoint has: diff, export, fetch, import, ls, show, verify",
        ),
        "ls": "`DIR...` is missing",
        "ls ''": "`DIR...` is empty",
        "ls missing": ("error: `missing` does not exist\n", "hint: name directories with steps, or a step\n"),
        "ls full file": "error: `file` is not a directory\n",
        "ls full --json full": "`full` is a directory",
        "show": "`STEP` is missing",
        "show file": ("`file` is not a directory", "name the directory that was saved to"),
        "show empty ''": "`[GLOB]` is empty",
        "show empty a b": "unexpected extra argument (b)",
        "verify missing": ("`missing` does not exist", "`tunetool checkpoint ls` lists them"),
        "verify dangling": "`dangling` does not exist",
        "verify empty": (
            "`empty` is not a checkpoint: it has no `.metadata`",
            "name one step, such as `empty/step_<N>`",
        ),
        "verify full": "`full` is not a checkpoint: it has no `.metadata`",
        "verify full --target x": "`--target` is not an option",
        "diff full": "`B` is missing",
        "diff empty missing": "`empty` is not a checkpoint",
        "export full": "`OUT` is missing",
        "export empty new": "`empty` is not a checkpoint",
        "export full new --processes 0": "`--processes`",
        "export full new --shard-size big": "`--shard-size big`",
        "export full new --dtype int8": "`--dtype`",
        "import full": "`STEP` is missing",
        "fetch step_5": "`--from` is missing",
        "fetch five --from full": "`five` is not a step directory",
        "fetch step_5 --from nowhere": ("`nowhere` is not a directory", "or `HOST:DIR`"),
        "fetch step_5 --from ''": "`--from` is empty",
        "fetch step_5 --from full --from node2:scratch": "is not absolute",
        "fetch step_5 --from localhost:/scratch": "`localhost` is this node itself",
        "fetch step_5 --from -oProxyCommand=x:/scratch": "not a host's name",
        "fetch step_5 --from node2:/scratch --host ../x": "not a host's name",
    },
    "advise checkpoint": {
        EXAMPLE: "the model's size must be given exactly once",
        f"--model-size 140GB {EXAMPLE} --model 7b": "the model's size must be given exactly once",
        "--model-size 140GB --samples-per-second 100 --rework 0.5h": "the speed of writing a checkpoint is missing",
        f"--model-size 140GB {EXAMPLE} --nodes 4": "`--nodes` needs `--mtbf`",
        f"--model-size 140GB {EXAMPLE} --mtbf forever": "`--mtbf forever` is not a time",
        f"--model-size 140GB {EXAMPLE} --mtbf 0h": "`--mtbf 0h` is not a time",
        f"--model-size 140GB {EXAMPLE} --rework 30": "`--rework 30` is not a time",
        f"--model-size 140GB {EXAMPLE} --bandwidth 10Gbps": "in bits",
        f"{EXAMPLE} --model-size 140": "`--model-size 140`",
        f"{EXAMPLE} --model-size 1B": "holds no parameter",
        f"--model-size 140GB {EXAMPLE} --samples-per-second 0": "is not above zero",
        f"--model-size 140GB {EXAMPLE} --samples-per-second nan": "is not above zero",
        f"--model-size 140GB {EXAMPLE} --engine direct": "`--engine` needs `--record`",
        f"--model-size 140GB {EXAMPLE} --record ''": "`--record` is empty",
        f"--model-size 140GB {EXAMPLE} --network 5GBps": "the speed of shared storage is missing",
        f"--model-size 140GB {EXAMPLE} --dwpd 1": "the speed of shared storage is missing",
        f"{SHARED} --drives 8": "the drives' rating is missing",
        f"{SHARED} --dwpd 1 --tbw 7PB": "`--dwpd` and `--tbw` are two ratings",
        f"{SHARED} --dwpd 1": "the number or the size of the drives is missing",
        f"{SHARED} --dwpd 0": "`--dwpd 0.0` is not above zero",
        f"{SHARED} --dwpd 1 --inspection nowhere": "`nowhere` cannot be read",
        f"{SHARED} --dwpd 1 --inspection bare.json": "`bare.json` is no inspection of a node",
    },
    "advise model": {
        "70b --gpus 8 --nodes 3": "`--gpus 8` do not spread evenly",
        "70b --stage 1 --offload nvme": "`--stage 1` has no `--offload nvme`",
        "70b --save-share 0%": "`--save-share 0%` leaves no time",
        "71b": "`71b` is neither a known model nor a path",
        "70b --save-in 0s": "is not a time",
    },
    "advise io": {
        "--model 70b --ep 2 --dp 2": "`70b` has no experts",
        "--model mixtral-8x7b --ep 3 --dp 3": "does not divide the 8 experts",
        "--model mixtral-8x7b --ep 2": "`--ep 2` does not divide the 1 ranks",
        "--model tiny --pp 100": "`--pp 100` stages",
        "--dp 65537": "65537 ranks are more than",
        "--dp 4 --batch 6": "`--batch 6` does not spread evenly",
    },
    "bench api --target full": {
        "--size 1000B": "`1000` bytes cannot be moved exactly",
        "--size 0": "`--size 0`: there is nothing to time",
        "--size 1MiB --pending 3": "`1048576` bytes cannot be moved exactly",
        "--size 1MiB --parallelism 5": "`1048576` bytes cannot be moved exactly",
    },
    "bench dataset --target full": {
        "--engines nothing": "`nothing` is not an engine",
        "--states warm,tepid": "`--states warm,tepid`: not all are known",
        "--states warm --engines direct-shuffled": "has nothing to read for these engines",
        "--image-side 10": "`--image-side 10` is too small",
        "--threads 99999999999": "`--threads 99999999999` is too many",
        "--num-workers 0,9999": "`--num-workers 9999` is too many",
        "--size 1kB": "fewer than one sample of 4096",
        "--jsonl none": "none` cannot be read",
        "--jsonl empty.jsonl": "empty.jsonl` is empty",
        "--jsonl broken.jsonl": "broken.jsonl` line 2: it is not JSON",
    },
    "bench drives": {
        "": "there is nothing to measure",
        "--target /nonexistent": "does not exist",
        "--target /dev/shm": "on no drive",
        "--drives A,B --target full": "`--drives` is for blank drives alone",
        "--drives A,A": "names a serial twice",
        "--target full --layout raid0-xfs": "`--layout` makes file systems",
        f"{DRIVE} --layout raid5-xfs": "`--layout raid5-xfs` is not a layout",
        f"{DRIVE} --layout raid10-xfs": "`--layout raid10-xfs` over 2 drives: RAID10 needs at least 4",
        f"{DRIVE} --layout raid1-xfs --counts 1": "`--layout raid1-xfs` over 1 drive: RAID1 needs at least 2",
        f"{DRIVE} --counts 1,3": "`--counts 3`: there are 2 drives",
        "--target full --virtual 65": "`--virtual 65` is too many",
        "--target full --virtual 1 --engines nope": "`nope` is not an engine",
        "--target full --virtual 1 --bytes-per-drive 1MiB": "does not fit",
        "--target full --bytes-per-drive 0": "`--bytes-per-drive 0 B` does not fit",
        "--virtual 2": "there is nothing to measure",
    },
    "bench experts": {
        "": "--target",
        "--target /nonexistent": "does not exist",
        "--target /dev/shm": "in memory",
        "--target full --experts 9999": "`--experts 9999` is too many",
        "--target full --threads 1000": "`--threads 1000` is too many",
        "--target full --expert-bytes 0": "`--expert-bytes 0` is not the size of an expert",
        "--target full --expert-bytes 1kB": "`--expert-bytes 1000` is not the size of an expert",
        "--target full --top-k 65": "a step cannot want 65 of 64 experts",
        "--target full --cached 64": "`--cached 64`: the cache holds",
        "--target full --cached 4": "`--cached 4`: the cache holds",
        "--target full --zipf 5": "`--zipf 5.0` is not an exponent",
        "--target full --zipf nan": "`--zipf nan` is not an exponent",
        "--target full --config /nonexistent": "`/nonexistent` cannot be read",
        "--target full --config llama/config.json": "no experts that are known",
    },
    "bench kv-cache": {
        "": "--target",
        "--target /nonexistent": "does not exist",
        "--target full --model nope": "`nope` is neither a known model nor a path",
        "--target full --model llama/config.json": "is missing or not a number",
        "--target full --engines nope": "`nope` is not an engine",
        "--target full --size 1MB": "`--size 1000000` holds 0 blocks",
        "--target full --longest 8": "`--longest 8` is less than a block",
        "--target full --threads 1000": "`--threads 1000` is too many",
        "--target full --requests 9999999": "`--requests 9999999` is too many",
        "--target full --zipf nan": "`--zipf nan` is not an exponent",
        "--target full --prefill-rate 0": "`--prefill-rate 0` is no rate",
        "--target full --dwpd nan": "`--dwpd nan` is no rate",
        "--target full --trace /nonexistent": "`/nonexistent` cannot be read",
        "--target full --trace broken.jsonl": "`broken.jsonl` line 1: `timestamp` is missing",
        "--target full --trace text.json": "`text.json` line 1 is no JSON",
    },
    "bench finetune": {
        "": "nothing to train",
        "--model tiny": "the model and pictures must be made, but there is no `--target`",
        "--model /m": "pictures must be made, but there is no `--target`",
        "--model tiny --target /t --dataset /d --images 3": "`--images`",
        "--model tiny --target /t --limit a": "`--limit` needs an inventory",
        "--model tiny --target t -i hosts": "`--target t` is not absolute",
        "--model m --target /t -i hosts": "`--model m` is not absolute",
        "--model tiny --target full --device cpu --checkpoint full --dry-run": "full` exists",
    },
    "bench inference": {
        "--target none": "does not exist",
        "--target full --model huge": "neither a decoder",
    },
    "bench loading": {
        "--engines nothing": "`nothing` is not an engine",
        "--gpus 0": "`--gpus 0` is not a list of numbers",
        "": "no directory to make the model in",
        "--model /nonexistent": "is neither a size nor a directory",
        "--model full --target full": "is read where it is",
        "--target /nonexistent": "does not exist",
    },
    "bench offload": {
        "--target full": "--model",
        "--model tiny": "no directory to offload to",
        "--model tiny --target /nonexistent": "does not exist",
        "--model tiny --target /dev/shm": "in memory",
        "--model huge --target full": "neither a known model nor a path",
        "--model mixtral-8x7b --target full": "of a family that `bench offload` does not train",
        "--model gpt2/config.json --target full": "type `gpt2`",
        f"{OFFLOAD} --sequence-length 4": "`--sequence-length 4` is too short",
        f"{OFFLOAD} --aio /nonexistent": "`/nonexistent` cannot be read",
        f"{OFFLOAD} --aio gds.json": "`use_gds` in the `aio` block",
        f"{OFFLOAD} --aio gpt2/config.json": "unknown: model_type",
    },
    "bench strategies --model tiny --target new": {
        "--steps 2": "`--steps 2`",
        "--epochs 1": "`--epochs`",
        "--matrix 8:z3": "`8:z3`",
    },
    "lab": {
        "up --nodes 0": "`--nodes`: 0 is not",
        "up --nodes 17": "`--nodes`: 17 is not",
        "up --nodes two": "`--nodes`: 'two' is not",
        "up --drives 0": "`--drives`: 0 is not",
        "up --drives 25": "`--drives`: 25 is not",
        "up --drive-size 4Q": "`4Q` is not a size",
        "up --drive-size 4": "`4` is not a size",
        "up --drive-size -4G": "`-4G` is not a size",
        "up --drive-size 1M": "`1M` is less than 64MiB",
        "up --drive-size 100000001B": "`100000001B` is not a whole number of MiB",
        "up --memory 64M": "`64M` is less than 512MiB",
        "up --memory ''": "`--memory`: `` is not a size",
        "up --os windows": "'windows' is not one of",
        "up extra": "unexpected extra argument (extra)",
        "fault node1": "`KIND` is missing",
        "fault node1 in-use": "node1` is not a node of this lab",
        "fault node1 earthquake": "`earthquake` is not a fault",
        "fault node1 in-use --drive NOPE": "node1` is not a node of this lab",
        "reset node1": "node1` is not a node of this lab",
        "reset ../node1": "node1` is not a node of this lab",
        "reset node1 --to built": "node1` is not a node of this lab",
        "reset node1 --to ../built": "node1` is not a node of this lab",
        "reset node1 --to x": "node1` is not a node of this lab",
        "save node1": "`NAME` is missing",
        "save node1 built": "node1` is not a node of this lab",
        "save node1 x": "node1` is not a node of this lab",
        "reboot node1": "node1` is not a node of this lab",
        "ssh node1": "`node1` is not a node of this lab",
        "ssh node1 -- true": "`node1` is not a node of this lab",
        "inventory": "the lab has no nodes",
    },
}


@pytest.fixture
def place(refusals: Refusals, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Refusals:
    """A directory with ``FILES``, on a drive of a machine that has no manifest, no lab and no QEMU."""
    here = refusals.directory
    for name, text in FILES.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(text)
    (here / "empty").mkdir()
    (here / "dangling").symlink_to("nothing")
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(here / "made"))
    # A lab has locks there.
    elsewhere = str(tmp_path_factory.mktemp("lab"))
    monkeypatch.setenv("TUNETOOL_LAB_DIR", elsewhere)
    monkeypatch.setattr("tunetool.lab.state.tempfile.gettempdir", lambda: elsewhere)
    monkeypatch.setattr(programs, "find", lambda program: None)
    # On a node, a command would go on under the Python of its manifest, in the place of this process.
    monkeypatch.setattr(training_python, "MANIFEST_PATH", str(here / "no-manifest"))
    monkeypatch.setattr(verify, "MANIFEST_PATH", str(here / "no-manifest"))
    for module in (dataset, drives, experts, kv_cache, media):
        monkeypatch.setattr(module, "read_stack", on_a_drive(here))
    return refusals


def on_a_drive(here: Path) -> Callable[[str], BlockStack]:
    """Whatever the temporary directory of this machine lies on."""
    leaf = Leaf("vda", "disk", None, True, ("vda",))

    def read(directory: str) -> BlockStack:
        stack = read_stack(directory)
        if Path(directory).resolve().is_relative_to(here):
            return replace(stack, medium="disk", leaves=(leaf,), in_memory=False)
        return stack

    return read


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param([*shlex.split(command), *shlex.split(options)], said, id=f"{command} {options}"[:99])
        for command, rows in WRONG.items()
        for options, said in rows.items()
    ],
)
def test_a_wrong_call_is_refused(words: list[str], said: str | tuple[str, ...], place: Refusals) -> None:
    if words in (["inspect", "-i", "nowhere"], ["verify", "-i", "missing"]):
        pytest.importorskip("ansible_runner", reason="Ansible's control side needs Python 3.11")
    answer = place.refused(*words)
    for each in (said,) if isinstance(said, str) else said:
        assert each in answer
