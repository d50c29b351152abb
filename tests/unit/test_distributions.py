"""Distributions, recognised by their files, and the paths, commands and packages that follow.

The trees under tests/data/distributions are made by hand: they have the files that each distribution documents, with the source.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from initramfs_images import image
from tunetool.node.array.initramfs_check import images, judge_images, mdadm_conf_path, rebuild_command
from tunetool.node.machine.distribution import parse_os_release, read_distribution

ROOT = Path(__file__).parents[2]
MADE = ROOT / "tests/data/distributions"
NAMES = sorted(path.stem for path in MADE.glob("*.json"))


@pytest.fixture(params=NAMES)
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    document = json.loads((MADE / f"{request.param}.json").read_text())
    assert document["made"].startswith("Made by hand")
    for name, text in document["files"].items():
        target = tmp_path / name.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return tmp_path, document


def relative(paths: list[str], root: Path) -> list[str]:
    return ["/" + str(Path(path).relative_to(root)) for path in paths]


def test_what_each_distribution_gets(machine: tuple[Path, dict[str, Any]]) -> None:
    root, document = machine
    expected = document["expected"]
    assert read_distribution(str(root)).family == expected["family"]
    # Before mdadm is installed there is no /etc/mdadm: check mode must name the right file all the same.
    assert not (root / "etc/mdadm").exists()
    assert mdadm_conf_path(str(root)) == expected["mdadm_conf"]
    assert rebuild_command(str(root)) == expected["rebuild"]
    assert relative(images(str(root)), root) == expected["images"]


def test_only_images_of_installed_kernels_can_be_stale(machine: tuple[Path, dict[str, Any]]) -> None:
    root, document = machine
    name = document["expected"]["mdadm_conf"]
    conf = root / name.lstrip("/")
    conf.parent.mkdir(parents=True, exist_ok=True)
    conf.write_text("ARRAY /dev/md/a UUID=1:2:3:4\n")

    def stale() -> list[str]:
        return relative([judged.path for judged in judge_images(name, str(root)) if judged.problem], root)

    for path in (root / "boot").iterdir():
        path.write_bytes(image("ARRAY /dev/md/a UUID=5:6:7:8\n"))
    assert stale() == document["expected"]["images"]
    for image_path in document["expected"]["images"]:
        (root / image_path.lstrip("/")).write_bytes(image(conf.read_text()))
    assert stale() == []


def test_packages_and_their_manager(machine: tuple[Path, dict[str, Any]]) -> None:
    yaml = pytest.importorskip("yaml")
    _, document = machine
    names = yaml.safe_load((ROOT / "roles/node_packages/vars/main.yml").read_text())["_node_packages_names"]
    assert names == document["expected"]["packages"]
    tasks = yaml.safe_load((ROOT / "roles/node_packages/tasks/main.yml").read_text())
    manager = document["facts"]["pkg_mgr"]
    fitting = [task for task in tasks if f"'{manager}'" in task["when"][1]]
    assert [key for task in fitting for key in task if key.startswith("ansible.builtin.")] == [
        f"ansible.builtin.{manager}"
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('ID="rhel"\nVERSION_ID="9.4"\n', "python3.11"),
        ("ID=ubuntu\nID_LIKE=debian\nVERSION_ID=20.04\n", "3.10 or newer"),
        ('ID="rhel"\nVERSION_ID="10.0"\n', "3.10 or newer"),
    ],
)
def test_an_old_python_gets_a_hint_that_fits(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/os-release").write_text(text)
    assert said in read_distribution(str(tmp_path)).python_hint


def test_an_unknown_distribution_is_judged_by_its_files(tmp_path: Path) -> None:
    assert read_distribution(str(tmp_path)).family is None
    assert mdadm_conf_path(str(tmp_path)) == "/etc/mdadm.conf"
    (tmp_path / "etc/mdadm").mkdir(parents=True)
    assert mdadm_conf_path(str(tmp_path)) == "/etc/mdadm/mdadm.conf"
    assert rebuild_command(str(tmp_path)) is None


def test_os_release_as_a_shell_reads_it() -> None:
    text = "# a comment\nNAME='It'\\''s'\nID=\"x y\"\nBROKEN=\"no end\nEMPTY=\n"
    assert parse_os_release(text) == {"NAME": "It's", "ID": "x y", "EMPTY": ""}
