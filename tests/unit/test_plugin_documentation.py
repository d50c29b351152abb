"""The documentation by `ansible-doc` equals the options that a module takes, with the parts that modules share."""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from calls import call

pytest.importorskip("ansible", reason="ansible-core is for control machines, with Python 3.11 and newer")

ROOT = Path(__file__).parents[2]
MODULES = sorted(path.stem for path in (ROOT / "plugins/modules").glob("*.py"))


@pytest.fixture(scope="module")
def documented() -> dict[str, Any]:
    done = call(
        str(Path(sys.executable).with_name("ansible-doc")),
        "-j",
        *(f"tunetool.node.{name}" for name in MODULES),
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        check=True,
    )
    plugins: dict[str, Any] = json.loads(done.stdout)
    return {name.rpartition(".")[2]: entry["doc"] for name, entry in plugins.items()}


class Taken(Exception):
    """Carries the options that the module declares."""


def taken(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], bool]:
    """The arguments that the module declares, and whether it knows check mode."""
    monkeypatch.setattr(sys, "path", [str(ROOT / ".ansible/collections"), *sys.path])
    module = importlib.import_module(f"ansible_collections.tunetool.node.plugins.modules.{name}")

    def declare(argument_spec: dict[str, Any], supports_check_mode: bool = False, **_: object) -> None:
        raise Taken(argument_spec, supports_check_mode)

    monkeypatch.setattr(module, "AnsibleModule", declare)
    with pytest.raises(Taken) as caught:
        module.main()
    return caught.value.args


def differences(documented: dict[str, Any], spec: dict[str, Any], where: str) -> list[str]:
    """Options that are undocumented, or documented with another type, default, choice or need."""
    wrong = [f"{where}{name}: only on one side" for name in sorted(set(documented) ^ set(spec))]
    for name in sorted(set(documented) & set(spec)):
        for key, empty in (("type", "str"), ("default", None), ("required", False), ("elements", None)):
            said, is_so = documented[name].get(key, empty), spec[name].get(key, empty)
            if said != is_so:
                wrong.append(f"{where}{name}: {key} {said!r} is {is_so!r}")
        if sorted(documented[name].get("choices") or []) != sorted(spec[name].get("choices") or []):
            wrong.append(f"{where}{name}: choices")
        if "suboptions" in documented[name]:
            inside = spec[name].get("options") or {}
            wrong += differences(documented[name]["suboptions"], inside, f"{where}{name}.")
    return wrong


def has_main(name: str) -> bool:
    tree = ast.parse((ROOT / f"plugins/modules/{name}.py").read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)


@pytest.mark.parametrize("name", [name for name in MODULES if has_main(name)])
def test_a_module_takes_what_its_documentation_says(
    name: str, documented: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, check_mode = taken(name, monkeypatch)
    assert differences(documented[name]["options"], spec, "") == []
    assert (documented[name]["attributes"]["check_mode"]["support"] != "none") == check_mode
    assert set(documented[name]["attributes"]) == {"check_mode", "diff_mode"}
    assert documented[name]["author"]


ROLES = {"ephemeral_unit": "ephemeral", "node_manifest": "tunetool", "scratch_removal": "replace_drive"}
"""The role whose variables a module takes, where it has another name."""
OF_OTHERS = {
    "host_memory": ["reboot_ok"],
    "scratch_removal": ["watch_seconds"],
    "training_environment": ["enabled"],
}
"""Variables of a role that its module does not take: something else asks for them."""


def as_asked(options: dict[str, Any]) -> dict[str, Any]:
    """What a value may be, without the words, and without what is taken where none is given: for a module, nothing."""
    kept = ("type", "elements", "choices")
    return {
        name: {
            **{key: sorted(option[key]) if key == "choices" else option[key] for key in kept if option.get(key)},
            "options": as_asked(option.get("options") or {}),
        }
        for name, option in options.items()
    }


def test_the_settings_of_a_module_are_the_variables_of_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are documented with the role alone."""
    yaml = pytest.importorskip("yaml")
    vars_of_tunetool = yaml.safe_load((ROOT / "roles/tunetool/vars/main.yml").read_text())
    of_others = {**OF_OTHERS, "node_manifest": vars_of_tunetool["_tunetool_of_the_program"]}
    compared = []
    for name in filter(has_main, MODULES):
        settings = taken(name, monkeypatch)[0].get("settings")
        if settings is None:
            continue
        role = ROLES.get(name, name)
        spec = yaml.safe_load((ROOT / f"roles/{role}/meta/argument_specs.yml").read_text())
        variables = {key[len(role) + 1 :]: option for key, option in spec["argument_specs"]["main"]["options"].items()}
        mine = {key: option for key, option in variables.items() if key not in of_others.get(name, ())}
        assert as_asked(settings["options"]) == as_asked(mine), name
        compared.append(name)
    assert compared == [
        "ephemeral_unit",
        "host_memory",
        "io_tuning",
        "job_scratch",
        "node_health",
        "node_manifest",
        "nvme_drives",
        "raid_array",
        "scratch_filesystem",
        "scratch_removal",
        "training_environment",
    ]
