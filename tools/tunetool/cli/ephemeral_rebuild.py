"""``tunetool ephemeral-rebuild``: what the unit `tunetool-ephemeral.service` runs at boot."""

from __future__ import annotations

import click


@click.command("ephemeral-rebuild", hidden=True)
@click.option("--dry-run", is_flag=True, help="Say what would be done; do nothing.")
@click.option("--unless", metavar="UUID", help="UUID of a file system: if it exists, do nothing.")
def command(dry_run: bool, unless: str | None) -> int:
    """Build the scratch volume again if every local drive came back blank; otherwise do nothing.

    For cloud nodes whose local drives are blank after a stop and start. With `ephemeral_enabled: true` in the
    inventory, systemd runs this at boot before the volume is mounted. Reads the manifest; the array and the file system
    get the UUIDs that it names.

    Exit codes: 0 the volume is there, or was built again; 1 a drive is missing, not blank or not alike, or there is no
    manifest, and nothing was written; 2 the configuration or the manifest cannot be used; 3 the work failed.
    """
    from tunetool.ephemeral_rebuild import rebuild

    return int(rebuild(dry_run, click.echo, unless))
