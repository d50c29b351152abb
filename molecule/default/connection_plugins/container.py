"""Ansible's way into a container: `podman exec` or `docker exec`, so that no further collection is needed."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from ansible.errors import AnsibleConnectionFailure, AnsibleFileNotFound
from ansible.plugins.connection import ConnectionBase
from ansible.utils.display import Display

DOCUMENTATION = """
name: container
short_description: Run tasks in a local container
description: Runs tasks with podman or docker in a container of this machine.
author: The tunetool authors (@tunetool)
options:
  runtime:
    description: podman or docker.
    type: str
    default: podman
    vars: [{name: ansible_container_runtime}]
  remote_addr:
    description: Name of the container.
    type: str
    default: inventory_hostname
    vars: [{name: inventory_hostname}, {name: ansible_host}]
extends_documentation_fragment: [connection_pipelining]
"""


class Connection(ConnectionBase):  # type: ignore[misc]  # Ansible ships no types
    """One ``exec`` per command; nothing stays open."""

    transport = "container"
    has_pipelining = True

    def _connect(self) -> Connection:
        self._connected = True
        return self

    def _exec(self, argv: list[str], data: bytes | None) -> tuple[int, bytes, bytes]:
        runtime, name = self.get_option("runtime"), self.get_option("remote_addr")
        # As Ansible's own connection plugins say it: round trips are counted by these lines.
        Display().vvv(f"EXEC {shlex.join(argv)}", host=name)
        try:
            done = subprocess.run(
                [runtime, "exec", "--interactive", name, *argv], input=data or b"", capture_output=True, check=False
            )
        except FileNotFoundError:
            raise AnsibleConnectionFailure(f"`{runtime}` is not installed") from None
        return done.returncode, done.stdout, done.stderr

    def exec_command(self, cmd: str, in_data: bytes | None = None, sudoable: bool = True) -> tuple[int, bytes, bytes]:
        """Run a command line that Ansible made for a shell."""
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        return self._exec(["/bin/sh", "-c", cmd], in_data)

    def put_file(self, in_path: str, out_path: str) -> None:
        """Copy a file into the container."""
        super().put_file(in_path, out_path)
        try:
            data = Path(in_path).read_bytes()
        except FileNotFoundError:
            raise AnsibleFileNotFound(f"`{in_path}` does not exist") from None
        self._checked(["/bin/sh", "-c", f"cat > {shlex.quote(out_path)}"], data)

    def fetch_file(self, in_path: str, out_path: str) -> None:
        """Copy a file out of the container."""
        super().fetch_file(in_path, out_path)
        Path(out_path).write_bytes(self._checked(["cat", in_path], None))

    def _checked(self, argv: list[str], data: bytes | None) -> bytes:
        code, out, err = self._exec(argv, data)
        if code:
            raise AnsibleConnectionFailure(f"`{' '.join(argv)}` failed: {err.decode(errors='replace').strip()}")
        return out

    def reset(self) -> None:
        """Nothing is kept open: the next command is a new session by itself."""

    def close(self) -> None:
        """Nothing to close."""
        self._connected = False
