"""The state of a container after the roles, checked from outside by testinfra (molecule/default runs this)."""

from __future__ import annotations

import json

import pytest
from testinfra.host import Host

MIB = 2**20


@pytest.mark.parametrize("name", ["mdadm", "xfsprogs", "nvme-cli", "fio", "rsync"])
def test_packages(host: Host, name: str) -> None:
    assert host.package(name).is_installed


def test_no_recommended_mail_server_came_along(host: Host) -> None:
    assert not host.package("exim4-daemon-light").is_installed
    assert not host.package("postfix").is_installed


def test_memlock_for_logins(host: Host) -> None:
    limits = host.file("/etc/security/limits.d/60-tunetool-memlock.conf")
    assert (limits.user, limits.mode) == ("root", 0o644)
    for who in ("*", "root"):
        for kind in ("soft", "hard"):
            assert f"{who} {kind} memlock unlimited\n" in limits.content_string


@pytest.mark.parametrize("scope", ["system", "user"])
def test_memlock_for_services(host: Host, scope: str) -> None:
    text = host.file(f"/etc/systemd/{scope}.conf.d/60-tunetool-memlock.conf").content_string
    assert "[Manager]\nDefaultLimitMEMLOCK=infinity\n" in text


def test_systemd_took_the_limit(host: Host) -> None:
    assert host.check_output("systemctl show --property=DefaultLimitMEMLOCK") == "DefaultLimitMEMLOCK=infinity"


SHMEM_ENABLED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def shm_options(host: Host) -> str:
    """In fstab; the containers have the kernel of the machine that runs the tests."""
    huge = ",huge=within_size" if host.file(SHMEM_ENABLED).exists else ""
    return f"nosuid,nodev,size={48 * MIB}{huge}"


def test_dev_shm_now_and_at_the_next_boot(host: Host) -> None:
    mount = host.mount_point("/dev/shm")
    assert mount.filesystem == "tmpfs"
    assert f"size={48 * 1024}k" in mount.options
    assert ("huge=within_size" in mount.options) == host.file(SHMEM_ENABLED).exists
    lines = [line.split() for line in host.file("/etc/fstab").content_string.splitlines() if "/dev/shm" in line]
    assert lines == [["tmpfs", "/dev/shm", "tmpfs", shm_options(host), "0", "0"]]


def test_fstab_still_parses_and_keeps_what_others_wrote(host: Host) -> None:
    assert "/dev/disk/by-label/other /mnt/taken ext4 noauto,nofail 0 0" in host.file("/etc/fstab").content_string
    listed = host.check_output("findmnt --fstab --raw --noheadings --output FSTYPE,OPTIONS --target /dev/shm")
    assert listed == f"tmpfs {shm_options(host)}"


def test_no_huge_pages_were_asked_for(host: Host) -> None:
    assert not host.file("/etc/tmpfiles.d/60-tunetool-hugepages.conf").exists


def test_io_settings_of_the_containers_host_are_left_alone(host: Host) -> None:
    assert host.run("systemctl is-enabled fstrim.timer").stdout.strip() == "disabled"
    assert "enabled" in host.file("/etc/tunetool/io-tuning.json").content_string
    for path in ("udev/rules.d/90-tunetool-io.rules", "sysctl.d/90-tunetool-io.conf", "tmpfiles.d/60-tunetool-io.conf"):
        assert not host.file(f"/etc/{path}").exists


def test_no_manifest_of_what_was_not_built(host: Host) -> None:
    assert not host.file("/etc/tunetool/node.json").exists
    assert "ARRAY" not in [
        line.split(" ")[0] for line in host.file("/etc/mdadm/mdadm.conf").content_string.splitlines()
    ]


def test_the_program_is_on_everyones_path(host: Host) -> None:
    assert host.file("/usr/local/bin/tunetool").linked_to == host.file("/opt/tunetool/bin/tunetool").linked_to
    assert host.check_output("tunetool --version").startswith("tunetool")
    assert len(host.file("/opt/tunetool").listdir()) == 2  # bin, one venv


def test_checks_without_a_manifest_cannot_be_judged(host: Host) -> None:
    done = host.run("tunetool verify --level config --runs-dir /tmp/runs")
    assert done.rc == 3, done.stdout + done.stderr


def test_an_overlay_proves_nothing(host: Host) -> None:
    done = host.run("tunetool verify --target /var/tmp --duration 1s --runs-dir /tmp/runs --json -")
    assert done.rc == 3, done.stdout + done.stderr
    verdict = json.loads(done.stdout)["verdict"]
    # Debian 13's fio can also fail here by itself (`error`); the overlay is named all the same.
    assert verdict["status"] in ("unproven", "error")
    assert any("`/var/tmp` lies on overlay" in reason for reason in verdict["reasons"])


def test_inspect_knows_that_it_is_a_container(host: Host) -> None:
    done = host.run("tunetool inspect --json -")
    assert done.rc == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout)
    assert seen["host"]["container"]
    assert seen["memory"]["shm"] == 48 * MIB
    assert seen["memory"].get("shm_huge") == ("within_size" if host.file(SHMEM_ENABLED).exists else None)
    assert "--shm-size=" in {finding["id"]: finding["remedy"] for finding in seen["findings"]}["container.shm"]


def test_without_a_manifest_the_health_check_knows_nothing(host: Host) -> None:
    assert host.check_output("systemctl is-active tunetool-health.timer tunetool-health.socket") == "active\nactive"
    assert host.check_output("systemctl is-enabled tunetool-health.timer tunetool-health.socket") == "enabled\nenabled"
    host.check_output("systemctl start tunetool-health.service")
    result = json.loads(host.file("/run/tunetool/health.json").content_string)
    assert (result["status"], result["doubts"]) == ("unproven", ["manifest: there is none"])
    metrics = host.file("/var/lib/prometheus/node-exporter/tunetool-health.prom")
    assert metrics.mode == 0o644
    assert 'status="unproven"} 1.0' in metrics.content_string
    # Without a Slurm nothing is asked of one: the node's health is unknown.
    assert host.run("/opt/tunetool/bin/tunetool-health").rc == 0


ASK = """
import socket
path = b"/nvhcd.HealthCheckService/RunHealthCheck"
block = b"\\x83\\x86\\x04" + bytes([len(path)]) + path
with socket.socket(socket.AF_UNIX) as asking:
    asking.settimeout(60)
    asking.connect("/run/tunetool/health.sock")
    asking.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + len(block).to_bytes(3, "big") + b"\\1\\5\\0\\0\\0\\1" + block)
    asking.shutdown(socket.SHUT_WR)
    while piece := asking.recv(65536):
        print(piece)
"""


def test_jobs_get_no_directory_where_there_is_no_volume(host: Host) -> None:
    assert host.check_output("systemctl is-active tunetool-scratch.timer") == "active"
    host.check_output("systemctl start tunetool-scratch.service")
    done = host.run("/opt/tunetool/bin/tunetool-scratch make 12 --user root")
    assert done.rc == 3
    assert done.stderr.startswith("error: `/mnt/nvme_raid0` is not mounted. hint: ")


def test_the_socket_answers_everybody(host: Host) -> None:
    """By an ordinary user, as a job would ask; tests/unit/test_health_socket.py asks with gRPC's own client."""
    shown = host.check_output("setpriv --reuid=65534 --regid=65534 --clear-groups python3 -c %s", ASK)
    assert "grpc-status\\x0214" in shown
    assert "manifest: there is none" in shown
