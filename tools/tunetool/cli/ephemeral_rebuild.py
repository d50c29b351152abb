"""``tunetool ephemeral-rebuild``: what the unit `tunetool-ephemeral.service` runs at boot."""

from __future__ import annotations

import click


@click.command("ephemeral-rebuild", hidden=True)
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--unless", metavar="UUID", help="Do nothing where this file system is there: what the unit passes.")
def command(dry_run: bool, unless: str | None) -> int:
    """Make the scratch volume anew if every local drive came back blank; else do nothing.

    For cloud nodes whose local drives are blank after a stop and start: `ephemeral_enabled: true` in the inventory
    lets a boot run this before the volume is mounted. The array and the file system get the UUIDs of the manifest.
    Exit codes: 0 the volume is there or was made anew; 1 some drive is missing, not blank or not alike, or there is no
    manifest, and nothing was written; 2 the configuration or the manifest cannot be used; 3 the work failed.
    """
    from tunetool.ephemeral_rebuild import rebuild

    return int(rebuild(dry_run, click.echo, unless))
