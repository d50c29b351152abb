"""Write docs/reference/ from what the code says: roles' argument_specs, --help texts, JSON Schemas.

Without an option it writes; with ``--check`` it ends with 1 and names what is out of date.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import click
import yaml

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs/reference"
MARKUP = re.compile(r"\b([VOBCI]|RV)\(([^)]*)\)")


def plain(text: str | list[str]) -> str:
    """Ansible's markup as Markdown."""
    joined = " ".join(text) if isinstance(text, list) else text
    return MARKUP.sub(lambda match: ("**%s**" if match[1] == "B" else "`%s`") % match[2], joined).replace("|", "\\|")


def value(default: Any) -> str:
    return "" if default is None else f"`{json.dumps(default)}`"


def rows(options: dict[str, Any], prefix: str = "") -> list[str]:
    lines = []
    for name, option in options.items():
        kind = option["type"] + (f" of {option['elements']}" if "elements" in option else "")
        required = "**required**" if option.get("required") else value(option.get("default"))
        lines.append(f"| `{prefix}{name}` | {kind} | {required} | {plain(option['description'])} |")
        lines += rows(option.get("options", {}), prefix=f"{prefix}{name}[].")
    return lines


def roles() -> str:
    # In the order in which site.yml runs them, then those of the playbooks that take away.
    order = [
        role["role"].rsplit(".", 1)[1]
        for playbook in ("provision", "teardown", "replace_drive")
        for play in yaml.safe_load((ROOT / f"playbooks/{playbook}.yml").read_text())
        for role in play.get("roles", [])
    ]
    parts = [
        "# Roles\n\nIn the order in which `site.yml` runs them, then those of `playbooks/teardown.yml` and "
        "`playbooks/replace_drive.yml`. Generated from `roles/*/meta/argument_specs.yml`."
    ]
    for role in order:
        spec = yaml.safe_load((ROOT / f"roles/{role}/meta/argument_specs.yml").read_text())["argument_specs"]["main"]
        table = ["| variable | type | default | |", "|---|---|---|---|", *rows(spec["options"])]
        table = table if spec["options"] else ["No variables of its own."]
        parts.append(f"## {role}\n\n{spec['short_description']}. {plain(spec['description'])}\n\n" + "\n".join(table))
    return "\n\n".join(parts) + "\n"


def commands() -> str:
    from tunetool.cli.main import cli

    parts = ["# Commands\n\nGenerated from `--help`."]

    def walk(command: click.Command, name: str, parent: click.Context | None) -> None:
        context = click.Context(
            command,
            info_name=name,
            parent=parent,
            max_content_width=100,
            terminal_width=100,
            **command.context_settings,
        )
        parts.append(f"## {context.command_path}\n\n```text\n{command.get_help(context).rstrip()}\n```")
        if isinstance(command, click.Group):
            for child in command.list_commands(context):
                child_command = command.get_command(context, child)
                assert child_command is not None
                walk(child_command, child, context)

    walk(cli, "tunetool", None)
    return "\n\n".join(parts) + "\n"


def schema(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"


def pages() -> dict[str, str]:
    from tunetool import record
    from tunetool.inspect import fleet_model, model
    from tunetool.node.common import manifest

    return {
        "roles.md": roles(),
        "commands.md": commands(),
        "inspect.schema.json": schema(model.json_schema()),
        "inspect-fleet.schema.json": schema(fleet_model.json_schema()),
        "manifest.schema.json": schema(manifest.SCHEMA),
        "record.schema.json": schema(record.json_schema()),
    }


def main() -> int:
    stale = [name for name, text in pages().items() if not same(REFERENCE / name, text)]
    if "--check" in sys.argv:
        for name in stale:
            print(f"error: `docs/reference/{name}` is out of date\nhint: run tools/dev/docs.py", file=sys.stderr)
        return 1 if stale else 0
    for name, text in pages().items():
        (REFERENCE / name).write_text(text)
    return 0


def same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
