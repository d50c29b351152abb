"""Options after `--`: they reach Ansible in every command, and passwords are asked for once, before the play."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from hosts_commands import ON_HOSTS, with_inventory
from tunetool.cli.main import cli
from tunetool.errors import UsageProblem
from tunetool.fleet.ansible_options import answered, check, for_ssh, for_vault
from tunetool.fleet.options import HostsCommand
from tunetool.launch.deepspeed import ssh_settings
from tunetool.launch.job import Host
from tunetool.options.shared import without_secrets
from tunetool.record import read
from waiting import PATIENCE, until

pytest.importorskip("ansible_runner", reason="Ansible's control side needs Python 3.11")
PREFIX = Path(sys.executable).parent.parent


def call(*arguments: object, answer: str | None = None) -> Result:
    return CliRunner().invoke(cli, [str(each) for each in arguments], input=answer, standalone_mode=False)


def code_of(done: Result) -> int:
    return int(getattr(done.exception, "exit_code", done.return_value))


@pytest.fixture(autouse=True)
def memory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of this test for the passwords."""
    path = tmp_path_factory.mktemp("memory")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    return path


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    path = tmp_path / "hosts.yml"
    path.write_text("all: {hosts: {n1: {}}}\n")
    return path


def test_every_command_with_an_inventory_takes_them() -> None:
    for path, command in with_inventory(cli):
        assert isinstance(command, HostsCommand), path
        assert "[-- ANSIBLE_OPTION...]" in command.get_usage(click.Context(command)), path


@pytest.mark.parametrize("command", ON_HOSTS, ids=" ".join)
def test_ansible_s_own_words_end_a_call_that_is_wrong(command: tuple[str, ...], inventory: Path) -> None:
    done = call(*command, *ON_HOSTS[command], "-i", inventory, "--", "--privat-key-file", "x")
    assert code_of(done) == 2
    assert isinstance(done.exception, UsageProblem)
    expected = "Ansible refuses what follows `--`: unrecognized arguments: --privat-key-file"
    assert done.exception.message.startswith(expected)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-i", "other"], "`-i` is not passed"),
        (["--inventory=other"], "`-i` is not passed"),
        (["-bKl", "n1"], "`--limit` is not passed"),
        (["-f1"], "`--forks` is not passed"),
        (["--check"], "`--check` is not passed"),
        (["--step"], "`--step` is not passed"),
        (["--list-tasks"], "`--list-tasks` is not passed"),
        (["--help"], "`--help` is not passed"),
        (["--private-key"], "expected one argument"),
        (["-e", "@nowhere.yml"], "nowhere.yml"),
        (["nowhere.yml"], "the playbook: nowhere.yml could not be found"),
        (["playbooks/teardown.yml"], "is another playbook"),
    ],
)
def test_what_is_not_passed_on(words: list[str], said: str, inventory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    done = call("verify", "-i", inventory, "--", *words)
    assert code_of(done) == 2
    assert isinstance(done.exception, UsageProblem)
    assert said in done.exception.message
    assert "\n" not in done.exception.message


def test_names_that_begin_with_a_dash_are_still_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-source").mkdir()
    Path("-source/data").write_bytes(b"x")
    assert code_of(call("stage", "copy", "--runs-dir", "runs", "--", "-source", "-copy")) == 0
    assert Path("-copy/data").read_bytes() == b"x"


@pytest.mark.skipif(not (PREFIX / "bin/tunetool").exists(), reason="tunetool is not installed as a program here")
def test_a_vault_and_a_file_reach_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Path) -> None:
    source, runs = tmp_path / "source", tmp_path / "runs"
    source.mkdir()
    (source / "data").write_bytes(b"x" * 1000)
    variables = tmp_path / "inventory/group_vars/all"
    variables.mkdir(parents=True)
    (tmp_path / "inventory/hosts.yml").write_text("all: {hosts: {n1: {}}}\n")
    # The vault says how to reach the host, the file where its program is.
    vault = variables / "vault.yml"
    vault.write_text(f"ansible_connection: local\nansible_python_interpreter: {sys.executable}\n")
    (tmp_path / "password").write_text("right")
    ansible_vault = [str(PREFIX / "bin/ansible-vault"), "encrypt", "--vault-password-file", str(tmp_path / "password")]
    subprocess.run([*ansible_vault, str(vault)], check=True, capture_output=True, timeout=PATIENCE)
    (tmp_path / "prefix.yml").write_text(f"tunetool_prefix: {PREFIX}\n")
    monkeypatch.chdir(tmp_path)
    # Ansible would ask where nobody can answer, and the play would never end.
    monkeypatch.setenv("ANSIBLE_BECOME_ASK_PASS", "True")
    options = ("-i", "inventory", "--no-become", "--runs-dir", runs, "--", "-e", "@prefix.yml")
    done = call("stage", "copy", source, tmp_path / "copy", *options, "--ask-vault-pass", answer="right\n")
    assert code_of(done) == 0, done.output
    assert (tmp_path / "copy/data").read_bytes() == b"x" * 1000
    assert [host.status for host in read(next(runs.iterdir())).hosts or []] == ["pass"]
    done = call("stage", "verify", tmp_path / "copy", *options, "--vault-id", "prompt", answer="wrong\n")
    assert code_of(done) in (2, 3)
    assert "ecrypt" in str(getattr(done.exception, "message", done.output))
    assert not list(memory.iterdir())


@pytest.mark.parametrize(("password", "said"), [(None, "no password was given"), ("wrong", "another password")])
@pytest.mark.parametrize(
    "command", [("verify", "--level", "config"), ("bench", "finetune", *ON_HOSTS[("bench", "finetune")])]
)
def test_a_vault_without_its_password_is_hinted_as_that(
    tmp_path: Path, command: tuple[str, ...], password: str | None, said: str
) -> None:
    variables = tmp_path / "inventory/group_vars/all"
    variables.mkdir(parents=True)
    (tmp_path / "inventory/hosts.yml").write_text("all: {hosts: {n1: {ansible_connection: local}}}\n")
    (variables / "vault.yml").write_text("secret: 1\n")
    (tmp_path / "password").write_text("right")
    ansible_vault = [str(PREFIX / "bin/ansible-vault"), "encrypt", "--vault-password-file", str(tmp_path / "password")]
    subprocess.run([*ansible_vault, str(variables / "vault.yml")], check=True, capture_output=True, timeout=PATIENCE)
    more = []
    if password is not None:
        (tmp_path / "other").write_text(password)
        more = ["--", "--vault-password-file", str(tmp_path / "other")]
    done = call(*command, "-i", tmp_path / "inventory", "--runs-dir", tmp_path / "runs", *more)
    assert code_of(done) in (2, 3)
    assert said in str(getattr(done.exception, "hint", ""))
    assert "--ask-vault-password" in str(getattr(done.exception, "hint", ""))


def test_they_reach_the_play_that_starts_ranks(tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yml"
    inventory.write_text("all: {hosts: {n1: {}}}\n")
    local = f"ansible_connection=local ansible_python_interpreter={sys.executable}"
    options = ["-i", inventory, "--runs-dir", tmp_path / "runs", "--allow-busy"]
    # Without them the host is unreachable; with them its Python is one that does not exist.
    words = ["--", "-e", local, "-e", "launch_python=/nowhere/bin/python"]
    done = call("bench", "finetune", *ON_HOSTS[("bench", "finetune")], *options, *words)
    assert code_of(done) == 3, done.output
    assert "/nowhere/bin/python" in str(getattr(done.exception, "message", done.output))


def test_passwords_are_asked_for_once_and_are_gone_afterwards(memory: Path) -> None:
    prompts: list[str] = []

    def ask(prompt: str) -> str:
        prompts.append(prompt)
        return "" if prompt.startswith("BECOME") else f"{len(prompts)}"

    words = [
        "-bkK",
        "--ssh-common-args",
        "-o ProxyJump=b",
        "-u",
        "me",
        "--vault-id",
        "a@file",
        "--vault-id",
        "b@prompt",
    ]
    with answered(words, ask) as given:
        assert prompts == ["SSH password", "BECOME password (default: SSH password)", "Vault password (b)"]
        assert given[:3] == ("--become", "--user", "me")
        assert given[3:5] == ("--ssh-common-args", "-o ProxyJump=b")
        files = {name: Path(given[given.index(name) + 1]) for name in given if name.endswith("-password-file")}
        assert files["--connection-password-file"].read_text() == "1"
        assert files["--become-password-file"].read_text() == "1"
        assert files["--become-password-file"].stat().st_mode & 0o777 == 0o600
        assert files["--become-password-file"].parent.stat().st_mode & 0o777 == 0o700
        asked = given[-1].partition("@")
        assert (given[-4:-1], asked[0], Path(asked[2]).read_text()) == (
            ("--vault-id", "a@file", "--vault-id"),
            "b",
            "3",
        )
        assert for_vault(given) == ["--vault-id", "a@file", "--vault-id", given[-1]]
    assert not list(memory.iterdir())
    with answered(["-e", "x=1"], ask) as given:
        assert given == ("-e", "x=1")
    with pytest.raises(UsageProblem, match="the password for `--ask-become-pass` is empty"), answered(["-K"], ask):
        pass


def test_a_killed_command_leaves_no_password() -> None:
    code = (
        "import sys\nfrom tunetool.fleet.ansible_options import answered\n"
        "with answered(['-K'], lambda prompt: 'secret') as words:\n"
        "    print(words[-1], flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as done:
        assert done.stdout is not None
        path = Path(done.stdout.readline().strip())
        assert path.read_text() == "secret"
        done.kill()
        done.wait()
        until(lambda: not path.parent.exists())


def test_ctrl_c_at_the_question_ends_with_130(inventory: Path, memory: Path) -> None:
    pexpect = pytest.importorskip("pexpect", reason="Ansible's control side needs Python 3.11")
    words = ["-m", "tunetool", "verify", "-i", str(inventory), "--", "--ask-become-pass"]
    child = pexpect.spawn(sys.executable, words, timeout=PATIENCE, env=dict(os.environ))
    child.expect("BECOME password")
    os.kill(child.pid, signal.SIGINT)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    until(lambda: not list(memory.iterdir()))


def test_pdsh_gets_the_user_and_the_key() -> None:
    asked = for_ssh(["-u", "me", "--private-key=/k", "-K"])
    config, _ = ssh_settings([Host("n1", "10.0.0.1")], {"n1": {**asked, "ansible_port": 22}})
    assert 'User "me"' in config
    assert 'IdentityFile "/k"' in config


def test_pdsh_comes_as_ssh_does_where_hosts_meet_elsewhere() -> None:
    hosts = [Host("n1", "10.0.0.1"), Host("n2", "10.0.0.2")]
    config, _ = ssh_settings(hosts, {"n1": {"ansible_host": "127.0.0.1"}, "n2": {}})
    assert [line.split()[1] for line in config.splitlines() if "HostName" in line] == ['"127.0.0.1"', '"n2"']


def test_options_that_decide_nothing_for_ssh_are_let_through() -> None:
    check(["-e", "x=1", "--become-method", "su", "--start-at-task", "x"])


def test_a_record_keeps_no_password() -> None:
    given = ["tunetool", "verify", "--target", "/pass=x", "--", "-e", "ansible_become_password=hunter2 x=1"]
    given += ["-e", '{"vault_token": "hunter2"}', "--become-password-file=/run/pw", "-u", "me"]
    kept = without_secrets(given)
    assert "hunter2" not in " ".join(kept)
    assert kept[:5] == given[:5]
    assert kept[6] == "ansible_become_password=***"
    assert kept[-3:] == given[-3:]
