"""Wrong calls of ``replicate`` and ``recover``, and a peer that ssh cannot reach. tests/finetune has real peers."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the checkpoints are torch's own")

from small_steps import data_of, save, values

from tunetool.checkpoint import recover, replicate
from tunetool.errors import CannotJudge, UsageProblem
from waiting import PATIENCE

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"peer": socket.gethostname()}, f"`{socket.gethostname()}` is this node itself"),
        ({"peer": "-oProxyCommand=true"}, "`peer=-oProxyCommand=true`"),
        ({"host": "../other"}, "`host=../other`: not a host's name"),
        ({"peer_dir": "scratch"}, "`peer_dir=scratch` is not absolute"),
        ({"rate": 0}, "`rate=0` is not a rate"),
        ({"max_to_keep": 0}, "`max_to_keep=0` would keep nothing"),
    ],
)
def test_a_wrong_call_of_replicate_is_refused(tmp_path: Path, wrong: dict[str, Any], named: str) -> None:
    step = save(tmp_path / "step_1", 1)
    with pytest.raises(UsageProblem) as refused:
        replicate(step, **{"peer": "node2", **wrong})
    assert named in refused.value.message


def test_a_step_that_is_not_whole_here_is_not_replicated(tmp_path: Path) -> None:
    step = save(tmp_path / "step_1", 1)
    first, second = data_of(step)
    content = first.read_bytes()
    first.write_bytes(content[:-1])
    with pytest.raises(UsageProblem, match=f"`{first}` is cut short"):
        replicate(step, peer="node2")
    first.unlink()
    second.unlink()
    with pytest.raises(UsageProblem, match=f"`{step}` has no file that `.metadata` names"):
        replicate(step, peer="node2")
    (step / ".metadata").unlink()
    with pytest.raises(UsageProblem, match=f"`{step / '.metadata'}` cannot be read"):
        replicate(step, peer="node2")
    with pytest.raises(UsageProblem, match="is not a step directory"):
        replicate(tmp_path, peer="node2")


def test_a_peer_that_cannot_be_reached_is_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    step = save(tmp_path / "step_1", 1)
    work = replicate(step, peer="node2", ssh=("false",))
    outcome = work.wait(PATIENCE)
    assert outcome.path is None
    assert str(outcome.problem).startswith("`node2` does not answer: ")
    assert capfd.readouterr().err == f"warning: no replica of `{step}` on `node2`: {outcome.problem}\n"
    with pytest.raises(CannotJudge, match="`node2` does not answer"):
        work.wait(check=True)
    assert not work.running
    assert values(step) == (1, 1)


def test_what_is_there_or_no_step_is_not_recovered(tmp_path: Path) -> None:
    step = save(tmp_path / "step_1", 1)
    with pytest.raises(UsageProblem, match=f"`{step}` exists"):
        recover(step, peer="node2")
    with pytest.raises(UsageProblem, match="are the same step"):
        recover(tmp_path / "step_01", peer="node2")
    shutil.rmtree(step)
    with pytest.raises(UsageProblem, match="`peer=-x`"):
        recover(step, peer="-x")
    assert list(tmp_path.iterdir()) == []
