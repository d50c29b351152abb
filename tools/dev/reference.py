"""The reference pages that git lacks: every command's --help, the roles' variables, the schemas of ``inspect``.

website.py puts them on the site, dist.py into the wheel and the collection's archive, each into ``FOLDER``: other
documents link to them there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import click
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "docs/reference"
UNITS = (
    (r"^Number of (?P<unit>[a-z]+)", ""),
    (r"^Seconds ", "seconds"),
    (r"\bin (?P<unit>percent|microseconds)\b", ""),
    (r"V\([\d.]+[KMGT]i?Bps\)", "bandwidth"),
    (r"\bsize\b.*\bshare\b|V\([\d.]+[KMGT]i?B\).*\bshare\b", "size or share"),
    (r"V\([\d.]+[KMGT]i?B\)|\bor a size\b|\b(Page|Chunk) size\b", "size"),
    (r"^Time ", "time"),
)
"""The unit of a variable by how its description says it; ``unit`` is the group of that name, or else the second."""
MARKUP = re.compile(r"\b([VOBCI]|RV)\(([^)]*)\)")


def plain(text: str | list[str]) -> str:
    """Ansible's markup as Markdown."""
    joined = " ".join(text) if isinstance(text, list) else text
    return MARKUP.sub(lambda match: ("**%s**" if match[1] == "B" else "`%s`") % match[2], joined).replace("|", "\\|")


def value(default: Any) -> str:
    return "" if default is None else f"`{json.dumps(default)}`"


def unit(name: str, option: dict[str, Any]) -> str:
    """Of a variable with a quantity. A number without one ends this program: its description must say it."""
    joined = " ".join([option["description"]] if isinstance(option["description"], str) else option["description"])
    for pattern, word in UNITS:
        if match := re.search(pattern, joined):
            return word or str(match["unit"])
    if option["type"] in ("int", "float") and name != "numa_node":
        raise SystemExit(
            f"error: `{name}` has no unit\nhint: its description says it as UNITS of tools/dev/reference.py knows"
        )
    return ""


def rows(options: dict[str, Any], prefix: str = "") -> list[str]:
    lines = []
    for name, option in options.items():
        kind = option["type"] + (f" of {option['elements']}" if "elements" in option else "")
        required = "**required**" if option.get("required") else value(option.get("default"))
        lines.append(
            f"| `{prefix}{name}` | {kind} | {required} | {unit(name, option)} | {plain(option['description'])} |"
        )
        lines += rows(option.get("options", {}), prefix=f"{prefix}{name}[].")
    return lines


def spec_of(role: str) -> dict[str, Any]:
    document = yaml.safe_load((ROOT / f"roles/{role}/meta/argument_specs.yml").read_text())
    spec: dict[str, Any] = document["argument_specs"]["main"]
    return spec


def variables(spec: dict[str, Any]) -> str:
    table = ["| variable | type | default | unit | |", "|---|---|---|---|---|", *rows(spec["options"])]
    return "\n".join(table) if spec["options"] else "No variables of its own."


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
        spec = spec_of(role)
        parts.append(f"## {role}\n\n{spec['short_description']}. {plain(spec['description'])}\n\n{variables(spec)}")
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


def inspection() -> str:
    from tunetool.inspect import model

    return schema(model.json_schema())


def fleet_inspection() -> str:
    from tunetool.inspect import fleet_model

    return schema(fleet_model.json_schema())


MADE: Mapping[str, Callable[[], str]] = {
    f"{FOLDER}/commands.md": commands,
    f"{FOLDER}/roles.md": roles,
    f"{FOLDER}/inspect.schema.json": inspection,
    f"{FOLDER}/inspect-fleet.schema.json": fleet_inspection,
}
"""What makes each page, by the page's path in the checkout."""


@cache
def page(name: str) -> str:
    """The text of a page of ``MADE``."""
    return MADE[name]()
