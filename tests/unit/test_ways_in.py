"""The entry points: site.yml and the playbooks in a clone, and the built collection in an empty path."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from calls import call
from tunetool import __version__
from tunetool.node.plan.plan_file import TEARDOWN, document, dump

pytest.importorskip("ansible", reason="Ansible's control side needs Python 3.11")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def ansible(program: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return call(str(BIN / program), *arguments, cwd=cwd, env={**os.environ, "ANSIBLE_NOCOLOR": "1", **environment})


@pytest.mark.parametrize("inventory", ["inventory/h100", "inventory/h200", "inventory/lab-training"])
def test_the_shipped_inventories_pass_as_they_are(inventory: str) -> None:
    done = ansible("ansible-playbook", "site.yml", "-i", inventory, "--list-tasks")
    assert done.returncode == 0, done.stderr
    assert "tunetool.node.raid_array : Make or keep the array" in done.stdout


def test_the_playbook_runs_by_itself() -> None:
    done = ansible("ansible-playbook", "playbooks/provision.yml", "-i", "inventory/h100", "--list-tasks")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        (
            "nvme_drives_cuont=7",
            "`nvme_drives_cuont` is not a variable of this collection; did you mean `nvme_drives_count`?",
        ),
        ("io_tuning_dirty=1GiB io_tuning_dirty_background=2GiB", "`io_tuning_dirty_background` is not below"),
        ("apply_plan=galaxy.yml", "`galaxy.yml` is not a plan file"),
        ("plan_file=plan.json", "`plan_file` without `--tags plan` would build the nodes"),
    ],
)
def test_a_wrong_variable_stops_every_host_before_any_is_touched(variable: str, message: str) -> None:
    # example.com answers nothing here: had a connection been tried, a host would be unreachable.
    done = ansible("ansible-playbook", "site.yml", "-i", "inventory/h100", "-e", variable)
    assert done.returncode == 2
    assert message in done.stdout.replace("\n", " ") + done.stderr
    assert "unreachable=1" not in done.stdout
    assert "Choose the drives" not in done.stdout


def test_all_that_is_wrong_is_named_before_any_host_is_touched() -> None:
    wrong = {
        "raid_arry_name": "x",
        "scratch_filesystem_label": "thirteenchars",
        "scratch_filesystem_mount_point": "/",
        "host_memory_shm_size": "900%",
        "host_memory_hugepages": [{"size": "2MiB", "count": -5}],
        "raid_array_chunk": "banana",
        "nvme_drives_count": 0,
        "tunetool_install": "perhaps",
        "provision_serial": "none",
        "scratch_filesystem_mountpoint": "/x",
        "tunetool_expect": "50GBps",
        "io_tuning_nr_requests": 3,
        "apply_plan": "/nowhere/plan.json",
        "gpudirect_storage_cufile": {"properties": {"allow_compat_mod": True}},
        "gpudirect_storage_repository_url": "https://repository.example",
        "gpudirect_storage_repository_key": "/nowhere/key.asc",
        "training_environment_enabled": True,
        "training_environment_wheelhouse": "/nowhere/wheels",
    }
    done = ansible("ansible-playbook", "site.yml", "-i", "inventory/h100", "-e", json.dumps(wrong))
    assert done.returncode == 2
    said = " ".join(done.stdout.split())
    for words in (
        "16 variables cannot be used. hint: each line below has its cure; nothing was changed",
        "`raid_arry_name` is not a variable of this collection; did you mean `raid_array_name`?",
        "label `thirteenchars` is longer than 12",
        "mount point `/` is not usable",
        "`900%` is not a share of the RAM",
        "huge pages {size: 2MiB, count: -5}: a count below zero",
        "`banana` is not a quantity",
        "`nvme_drives_count` is 0",
        "argument 'tunetool_install' is of type",
        "`provision_serial` has `none`",
        "did you mean `scratch_filesystem_mount_point`?",
        "did you mean `tunetool_expect_",
        "`io_tuning_nr_requests` is `3`. hint: a whole number from 4 to 65535",
        "role tunetool:",
        "plan file `/nowhere/plan.json` cannot be read",
        "did you mean `properties.allow_compat_mode`?",
        "`gpudirect_storage_repository_key`: `/nowhere/key.asc`: No such file or directory. hint: ",
        "`training_environment_wheelhouse`: `/nowhere/wheels/wheelhouse.json` cannot be read: No such file",
    ):
        assert words in said, words
    assert "\n4 of 4 REFUSED: 16 variables cannot be used." in done.stdout, done.stdout
    assert "unreachable=1" not in done.stdout


def test_groups_that_differ_in_a_variable_are_named_with_files(tmp_path: Path) -> None:
    playbook, variables = tmp_path / "play/validate.yml", tmp_path / "inventory/group_vars"
    for directory in playbook.parent, variables, tmp_path / "inventory/host_vars":
        directory.mkdir(parents=True)
    tasks = [{"tunetool.node.validate_variables": {}}]
    playbook.write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))
    groups = {
        "h100": {"hosts": {"n1": {}, "n2": {}, "n3": {}}},
        "rack1": {"hosts": {"n1": {}, "n2": {}}},
        "rack2": {"hosts": {"n3": {}}, "vars": {"ansible_group_priority": 2}},
    }
    (tmp_path / "inventory/hosts.yml").write_text(yaml.safe_dump({"all": {"children": groups}}))
    (variables / "all.yml").write_text("ansible_connection: local\nnvme_drives_count: 8\nraid_array_chunk: 2MiB\n")
    (variables / "h100.yml").write_text("nvme_drives_count: 8\nraid_array_chunk: 1MiB\nmine: 1\n")
    for name in ("rack1", "rack2"):
        (variables / f"{name}.yml").write_text("nvme_drives_count: 8\nraid_array_chunk: 512KiB\nmine: 2\n")
    (tmp_path / "inventory/host_vars/n2.yml").write_text("raid_array_chunk: 1MiB\n")
    done = ansible("ansible-playbook", "-i", str(tmp_path / "inventory"), str(playbook))
    said = " ".join(done.stdout.split())
    for words in (
        "`raid_array_chunk` is `1MiB` in group `h100`",
        "h100.yml",
        "and `512KiB` in group `rack1`",
        "rack1.yml",
        "only the alphabet decides between them. hint: set it in one of them or in host_vars",
    ):
        assert words in said, said
    assert "`nvme_drives_count` is" not in said
    assert "`mine`" not in said
    failed = {host: re.search(rf"^{host} .*failed=(\d)", done.stdout, re.MULTILINE) for host in ("n1", "n2", "n3")}
    assert {host: line and line[1] for host, line in failed.items()} == {"n1": "1", "n2": "0", "n3": "0"}


def test_variables_of_launches_are_known(tmp_path: Path) -> None:
    playbook = tmp_path / "validate.yml"
    tasks = [{"tunetool.node.validate_variables": {}}]
    playbook.write_text(yaml.safe_dump([{"hosts": "localhost", "gather_facts": False, "tasks": tasks}]))
    given = ("-i", "localhost,", "-c", "local", "-e", "@inventory/h100/group_vars/all.yml")
    done = ansible(
        "ansible-playbook", *given, "-e", "tunetool_slots=8", "-e", "tunetool_address=10.0.0.1", str(playbook)
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--tags", "array"),
            "the part `array` needs what `drives` answer in the same run. hint: `--tags drives,array`",
        ),
        (("--tags", "filesystem,array"), "the part `array` needs what `drives` answer"),
        (("--tags", "filesystem"), "`--tags drives,array,filesystem`"),
        (("--skip-tags", "drives"), "the part `array` needs what `drives` answer"),
        (("--tags", "tunetool"), "`--tags drives,array,filesystem,memory,tuning,gds,reboot,tunetool`"),
        (("--tags", "tunetool", "-e", "tunetool_volume=/data"), "`--tags memory,reboot,tunetool`"),
    ],
)
def test_a_part_without_those_that_it_needs_is_refused(arguments: tuple[str, ...], message: str) -> None:
    done = ansible("ansible-playbook", "site.yml", "-i", "inventory/h100", *arguments)
    assert done.returncode == 2
    said = " ".join(done.stdout.split())
    assert message in said
    assert "nothing was changed" in said
    assert "unreachable=1" not in done.stdout


ALONE = ("-i", "localhost,", "-c", "local", "--check", "-e", "ansible_become=false", "-e", "nvme_drives_count=1")


@pytest.mark.parametrize(
    "tag", ["packages", "gds", "memory", "tuning", "reboot", "training", "ephemeral", "health", "drives"]
)
def test_every_other_part_runs_alone(tag: str) -> None:
    """What a host of this kind lacks may stop it, not what another part would have answered."""
    asked = ("-e", "gpudirect_storage_mode=auto", "-e", "node_packages_update_cache=false")
    done = ansible(
        "ansible-playbook",
        "site.yml",
        *ALONE,
        *asked,
        "-e",
        f"ansible_python_interpreter={sys.executable}",
        "--tags",
        tag,
    )
    said = " ".join((done.stdout + done.stderr).split())
    for words in ("undefined", "has no attribute", "Traceback", "needs what"):
        assert words not in said, said
    assert "PLAY [Build the scratch volume and the host around it]" in said
    if tag == "packages":
        assert "Learn which package manager the host has" in said


SWAP = ("-e", "replace_drive_old_serial=A", "-e", "replace_drive_new_serial=B")


@pytest.mark.parametrize(
    ("playbook", "arguments", "message"),
    [
        ("replace_drive", SWAP[:2], "missing required arguments: replace_drive_new_serial"),
        ("replace_drive", SWAP, "a drive is replaced on one host, not on 4. hint: `--limit"),
        ("replace_drive", (*SWAP, "-e", "replace_drive_serial=C"), "did you mean `replace_drive_"),
        ("teardown", ("-e", "plan_file=plan.json"), "`plan_file` without `--tags plan` would change the nodes"),
        ("teardown", ("-e", "apply_plan=/nowhere/plan.json"), "plan file `/nowhere/plan.json` cannot be read"),
    ],
    ids=["one serial", "many hosts", "misspelt", "tag forgotten", "no plan"],
)
def test_what_takes_away_is_as_strict(playbook: str, arguments: tuple[str, ...], message: str) -> None:
    done = ansible("ansible-playbook", f"playbooks/{playbook}.yml", "-i", "inventory/h100", *arguments)
    assert done.returncode == 2
    assert message in " ".join(done.stdout.split()) + done.stderr
    assert "unreachable=1" not in done.stdout
    assert "up]" not in done.stdout


def test_a_plan_for_one_playbook_is_refused_by_another(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(dump(document({}, "0", job=TEARDOWN)))
    done = ansible("ansible-playbook", "site.yml", "-i", "inventory/h100", "-e", f"apply_plan={path}")
    assert done.returncode == 2
    assert "is for `ansible-playbook tunetool.node.teardown`, not for `tunetool provision`" in " ".join(
        done.stdout.split()
    )


def test_a_plan_of_what_is_taken_away_takes_nothing_away() -> None:
    for playbook in ("teardown", "replace_drive"):
        done = ansible(
            "ansible-playbook", f"playbooks/{playbook}.yml", "-i", "inventory/h100", "--list-tasks", "--tags", "plan"
        )
        assert done.returncode == 0, done.stderr
        assert "Look at the scratch volume" in done.stdout
        for task in ("Remove the scratch volume\t", "remove the volume\t", "Make or keep", "Choose the drives"):
            assert task not in done.stdout


def test_a_plan_runs_no_role_that_builds() -> None:
    for playbook, tags in (("site.yml", ["--tags", "plan"]), ("playbooks/plan.yml", [])):
        done = ansible("ansible-playbook", playbook, "-i", "inventory/h100", "--list-tasks", *tags)
        assert done.returncode == 0, done.stderr
        assert "Look at the drives" in done.stdout
        assert "Make or keep" not in done.stdout
        assert "Choose the drives" not in done.stdout


def modules_start(collections: Path, directory: Path) -> None:
    """Ansible packs a module with everything that it imports. A module without a part of it ends before it reads its options.

    These use every room of module_utils between them; without their options they change nothing.
    """
    names = ["node_manifest", "nvme_drives", "scratch_removal", "run_tunetool"]
    tasks = [{f"tunetool.node.{name}": {}, "ignore_errors": True} for name in names]
    # What runs on the controller imports the same files in another way.
    tasks.append({"tunetool.node.validate_variables": {}})
    playbook = directory / "start.yml"
    playbook.write_text(yaml.safe_dump([{"hosts": "localhost", "gather_facts": False, "tasks": tasks}]))
    done = ansible(
        *("ansible-playbook", "--check", "-i", "localhost,", "-c", "local", str(playbook)),
        *("-e", f"ansible_python_interpreter={sys.executable}"),
        cwd=directory,
        ANSIBLE_COLLECTIONS_PATH=str(collections),
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count('"msg": "missing required arguments: ') == len(names), done.stdout


def tasks_of(listing: str) -> list[tuple[str, set[str]]]:
    """The plays and tasks of `--list-tasks`, each with its tags, whose order is random."""
    lines = [line for line in listing.splitlines() if line.strip() and not line.startswith("playbook:")]
    split = [line.partition("TAGS: [") for line in lines]
    return [(line.strip(), set(tags.rstrip("]").split(","))) for line, _, tags in split]


def the_whole_site_runs_alone(collections: Path, directory: Path) -> None:
    """`tunetool.node.site` is the clone's site.yml: the same tasks under every tag, and it really runs."""
    alone = {"cwd": directory, "ANSIBLE_COLLECTIONS_PATH": str(collections)}
    site, inventory = "tunetool.node.site", ("-i", str(ROOT / "inventory/h100"))
    for tags in ((), ("--tags", "plan,verify")):
        listed = [
            ansible("ansible-playbook", name, *inventory, "--list-tasks", *tags, **where)
            for name, where in (("site.yml", {}), (site, alone))
        ]
        clone, installed = (tasks_of(done.stdout) for done in listed)
        assert clone == installed != []
    hosts = directory / "hosts.yml"
    variables = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "ansible_become": False}
    # More drives than any machine has, so that every machine is refused.
    hosts.write_text(yaml.safe_dump({"all": {"hosts": {"n1": {**variables, "nvme_drives_count": 999}}}}))
    done = ansible("ansible-playbook", site, "-i", str(hosts), "--check", **alone)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "999 drives asked for, " in " ".join(done.stdout.split())
    assert "Make or keep the array" not in done.stdout
    done = ansible("ansible-playbook", site, "-i", str(hosts), "-e", "nvme_drives_cuont=7", **alone)
    assert "did you mean `nvme_drives_count`?" in done.stdout, done.stdout + done.stderr


def test_every_role_s_readme_has_an_example_that_ansible_takes(tmp_path: Path) -> None:
    roles = sorted(path.name for path in (ROOT / "roles").iterdir())
    examples, checks = [], []
    for role in roles:
        text = (ROOT / f"roles/{role}/README.md").read_text()
        (block,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        path = tmp_path / f"{role}.yml"
        path.write_text(block)
        examples.append(str(path))
        (play,) = yaml.safe_load(block)
        used = play.get("vars", {}) | {k: v for each in play.get("roles", []) for k, v in each.get("vars", {}).items()}
        named = {each["role"] for each in play.get("roles", [])} | {play.get("ansible.builtin.import_playbook")}
        # A reader fills this directory before; that it is absent is refused at once.
        used = {name: value for name, value in used.items() if name != "training_environment_wheelhouse"}
        # Each shows its own role: by name, or by a variable of it.
        assert f"tunetool.node.{role}" in named or any(name.startswith(f"{role}_") for name in used), role
        job = {"replace_drive": "replace", "teardown": "teardown"}.get(role, "provision")
        task = {"tunetool.node.validate_variables": {"job": job}}
        checks.append({"hosts": "localhost", "gather_facts": False, "vars": used, "tasks": [task]})
    done = ansible("ansible-playbook", "--syntax-check", "-i", "n1,", *examples)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("playbook: ") == len(roles)
    (tmp_path / "check.yml").write_text(yaml.safe_dump(checks))
    done = ansible("ansible-playbook", "-i", "localhost,", "-c", "local", str(tmp_path / "check.yml"))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("TASK [tunetool.node.validate_variables]") == len(roles)


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_the_commented_connection_of_an_inventory_is_one(name: str, tmp_path: Path) -> None:
    lines = (ROOT / f"inventory/{name}/hosts.yml").read_text().splitlines()
    start = lines.index("  # vars:")
    (tmp_path / "hosts.yml").write_text("\n".join([*lines[:start], *(re.sub("^  # ", "  ", x) for x in lines[start:])]))
    done = ansible("ansible-inventory", "-i", str(tmp_path / "hosts.yml"), "--list", "-e", "vault_become_password=x")
    assert done.returncode == 0, done.stderr
    variables = json.loads(done.stdout)["_meta"]["hostvars"][f"{name}-001.example.com"]
    assert variables["ansible_user"] == "ubuntu"
    assert variables["ansible_ssh_common_args"].startswith("-o ProxyJump=")
    assert set(variables) >= {"ansible_ssh_private_key_file", "ansible_become_password"}


def test_the_built_collection_works_in_an_empty_path(tmp_path: Path) -> None:
    built = ansible("ansible-galaxy", "collection", "build", "--output-path", str(tmp_path))
    assert built.returncode == 0, built.stderr
    (archive,) = tmp_path.glob("tunetool-node-*.tar.gz")
    collections = tmp_path / "collections"
    installed = ansible(
        "ansible-galaxy", "collection", "install", str(archive), "-p", str(collections), "--offline", cwd=tmp_path
    )
    assert installed.returncode == 0, installed.stderr
    tree = collections / "ansible_collections/tunetool/node"
    # The role `tunetool` builds the package from the collection's own files.
    assert (tree / "tools/tunetool/node/machine/drives.py").is_file()
    assert (tree / "constraints.txt").is_file()
    assert not (tree / "tests").exists()
    assert not (tree / ".venv").exists()
    done = ansible(
        "ansible-playbook",
        "tunetool.node.provision",
        "-i",
        str(ROOT / "inventory/h100"),
        "--list-tasks",
        cwd=tmp_path,
        ANSIBLE_COLLECTIONS_PATH=str(collections),
    )
    assert done.returncode == 0, done.stderr
    assert "Make or keep the array" in done.stdout
    the_whole_site_runs_alone(collections, tmp_path)
    modules_start(collections, tmp_path)
    callback = ["-t", "callback", "tunetool.node.host_summary"]
    done = ansible("ansible-doc", *callback, cwd=tmp_path, ANSIBLE_COLLECTIONS_PATH=str(collections))
    assert "log_verbosity=3" in done.stdout, done.stderr


def test_one_version_everywhere() -> None:
    galaxy = yaml.safe_load((ROOT / "galaxy.yml").read_text())
    role = yaml.safe_load((ROOT / "roles/tunetool/vars/main.yml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert galaxy["version"] == role["_tunetool_version"] == __version__
    assert f'version = "{__version__}"' in project
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_defaults_and_argument_specs_say_the_same() -> None:
    for role in sorted((ROOT / "roles").iterdir()):
        defaults = yaml.safe_load((role / "defaults/main.yml").read_text())
        spec = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
        optional = {name: option.get("default") for name, option in spec.items() if not option.get("required")}
        assert optional == defaults, role.name
        assert all(name.startswith(role.name + "_") for name in spec)


def test_a_variable_has_one_default() -> None:
    """A role whose variables are not loaded is asked for by `| default(...)`."""
    specs = [yaml.safe_load(path.read_text()) for path in ROOT.glob("roles/*/meta/argument_specs.yml")]
    options = {name: each for spec in specs for name, each in spec["argument_specs"]["main"]["options"].items()}
    files = [path for folder in ("roles/*/*", "playbooks") for path in ROOT.glob(f"{folder}/*.yml")]
    written = re.compile(r"\b(\w+) \| default\(('[^']*'|\[\]|\{\}|[a-z0-9]\w*)\)")
    said = [(path, match) for path in files for match in written.findall(path.read_text()) if match[0] in options]
    wrong = [(path.name, match) for path, match in said if yaml.safe_load(match[1]) != options[match[0]].get("default")]
    assert wrong == []
    assert len(said) > 15


def test_a_switch_that_comes_as_text_is_one() -> None:
    """`-e node_health_enabled=true` is text to Ansible, and a condition takes none of that."""
    specs = [yaml.safe_load(path.read_text()) for path in ROOT.glob("roles/*/meta/argument_specs.yml")]
    entries = [each["options"] for spec in specs for each in spec["argument_specs"].values() if "options" in each]
    switches = {name for options in entries for name, option in options.items() if option.get("type") == "bool"}
    assert "node_health_enabled" in switches
    bare = re.compile(rf"\b(?:{'|'.join(switches)})\b(?!\s*\|\s*(?:default\([^)]*\)\s*\|\s*)?bool\b)")

    def conditions(value: object) -> Iterator[str]:
        if isinstance(value, list):
            for each in value:
                yield from conditions(each)
        elif isinstance(value, dict):
            asked = value.get("when", [])
            yield from map(str, asked if isinstance(asked, list) else [asked])
            for each in value.values():
                yield from conditions(each)

    tasks = [*ROOT.glob("roles/*/tasks/*.yml"), *ROOT.glob("roles/*/handlers/*.yml"), *ROOT.glob("playbooks/*.yml")]
    found = [(path.parent.parent.name, each) for path in tasks for each in conditions(yaml.safe_load(path.read_text()))]
    assert len(found) > 20
    assert [each for each in found if bare.search(each[1])] == []
