"""ssh to a node, with the lab's own key, known hosts and short time-outs."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.lab.state import Lab, NodeState
from tunetool.node.common.commands import captured, last_line
from tunetool.node.common.waiting import wait_for

GUEST_COMMAND_SECONDS = 120.0


def options(lab: Lab, node: NodeState) -> list[str]:
    """ssh options for a node; the user's own configuration, agent and known hosts are not used."""
    return [
        "-F",
        "/dev/null",
        "-i",
        str(node.key),
        "-o",
        "IdentitiesOnly=yes",
        "-o",
        "IdentityAgent=none",
        *(part for option in host_options(lab.known_hosts) for part in ("-o", option)),
        "-p",
        str(node.ssh_port),
    ]


def host_options(known_hosts: Path) -> list[str]:
    """Options that Ansible needs too: nodes change on the same address, each with its own port."""
    return [
        "BatchMode=yes",
        "StrictHostKeyChecking=no",
        f"UserKnownHostsFile={known_hosts}",
        "GlobalKnownHostsFile=/dev/null",
        "LogLevel=ERROR",
        "ConnectTimeout=30",
    ]


def command(lab: Lab, node: NodeState, arguments: list[str]) -> list[str]:
    """The ssh command line that runs ``arguments`` on the node, or a shell when there are none."""
    # ssh takes the first value of an option. This node is known to be up; but while eight drives were pulled, on a busy
    # machine that emulates it, its server did not answer within the 30 s of `host_options`.
    return ["ssh", "-o", "ConnectTimeout=100", *options(lab, node), "root@127.0.0.1", *arguments]


def run(
    lab: Lab, node: NodeState, script: str, timeout: float = GUEST_COMMAND_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run a shell script on the node, sent through standard input so that nothing needs quoting."""
    process = start(lab, node, script)
    return finish(node, process, timeout)


def start(lab: Lab, node: NodeState, script: str) -> subprocess.Popen[str]:
    """Start a script on the node; ``finish`` waits for it. Several nodes work at once this way."""
    process = subprocess.Popen(
        command(lab, node, ["sh", "-eu"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None  # noqa: S101 -- Popen promises it for PIPE
    # An ssh that has already failed closed its end; `finish` reports why.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(script)
        process.stdin.close()
    process.stdin = None
    return process


def finish(
    node: NodeState, process: subprocess.Popen[str], timeout: float = GUEST_COMMAND_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Wait for a script that ``start`` started. Raises ``CannotJudge`` if it fails or does not end."""
    with process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise CannotJudge(
                f"`{node.name}` did not answer within {timeout:.0f} s", f"tunetool lab reset {node.name}"
            ) from None
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise CannotJudge(f"`{node.name}`: {last_line(errors or output, 'no output')}", f"tunetool lab ssh {node.name}")
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


class EndedWhileBooting(CannotJudge):
    """QEMU itself ended: it crashed, or the node switched itself off. Another boot may do."""


def wait_for_server(node: NodeState, seconds: float, alive: Callable[[], bool]) -> None:
    """Wait until the node's ssh server sends its banner; QEMU itself accepts connections long before that."""

    def answers() -> bool:
        if not alive():
            raise EndedWhileBooting(f"QEMU of `{node.name}` ended while it booted", "tunetool lab up")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", node.ssh_port), 2) as greeting:
            greeting.settimeout(5)
            return greeting.recv(4) == b"SSH-"
        return False

    if not wait_for(answers, seconds, 0.3):
        raise CannotJudge(f"`{node.name}` did not come up within {seconds:.0f} s", f"tunetool lab reset {node.name}")


def end_masters(lab: Lab, name: str) -> None:
    """Close the shared connections that Ansible keeps open for a minute: they outlive their node."""
    for path in control_dir(lab, name).glob("*"):
        captured(["ssh", "-F", "/dev/null", "-o", f"ControlPath={path}", "-O", "exit", "127.0.0.1"], 10)
        path.unlink(missing_ok=True)


def control_dir(lab: Lab, name: str) -> Path:
    """Directory of the sockets of shared connections to one node."""
    return lab.sockets / f"cm-{name}"
