"""What the health check writes, through Debian's own node_exporter and Prometheus; the alert rules by promtool.

The programs are unpacked, not installed. They listen on this machine's loopback alone.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from calls import call
from cluster_layer import NoLayer, layer
from tunetool.node.common.check_result import Check
from tunetool.report.prometheus import of_checks
from waiting import until

pytestmark = pytest.mark.slow  # it fetches 40 MB the first time

DOCS = Path(__file__).parents[2] / "docs/prometheus"
CHECKS = [
    Check("array.members", "fail", "", ""),
    Check("drives.wear", "pass", "", ""),
    Check("gds.mode", "skip", "", ""),
]
RULE_TESTS = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'tunetool_verdict{{kind="health", node="n1", status="fail"}}', values: '0 1x20'}}
      - {{series: 'tunetool_check{{kind="health", node="n1", check="array.members"}}', values: '0 1x20'}}
      - {{series: 'tunetool_check{{kind="health", node="n2", check="array.members"}}', values: '0x20'}}
      - {{series: 'tunetool_check{{kind="health", node="n2", check="drives.wear"}}', values: '3x20'}}
      - {{series: 'tunetool_finished_timestamp_seconds{{kind="health", node="n2"}}', values: '0x90'}}
      - {{series: 'tunetool_drive_months_left{{kind="health", node="n1", drive="S1", end="wear"}}', values: '7 5.5x20'}}
    alert_rule_test:
      - {{eval_time: 0m, alertname: TunetoolDriveWearsOut}}
      - eval_time: 3m
        alertname: TunetoolDriveWearsOut
        exp_alerts:
          - exp_labels: {{severity: warning, kind: health, node: n1, drive: S1, end: wear}}
            exp_annotations:
              summary: Drive S1 of n1 ends by wear in 5.5 months
              description: "Plan to replace it. On the node: tunetool verify --level config."
      - eval_time: 1m
        alertname: TunetoolNodeIsSick
      - eval_time: 3m
        alertname: TunetoolNodeIsSick
        exp_alerts:
          - exp_labels: {{severity: critical, kind: health, node: n1, status: fail}}
            exp_annotations:
              summary: n1 is not what was built, or a drive is ill
              description: "On the node: tunetool verify --level config. The alert TunetoolCheckFails names the checks."
      - eval_time: 3m
        alertname: TunetoolCheckFails
        exp_alerts:
          - exp_labels: {{severity: warning, kind: health, node: n1, check: array.members}}
            exp_annotations:
              summary: array.members fails on n1
              description: docs/guides/health-check.md says what to do for each check.
      - {{eval_time: 45m, alertname: TunetoolHealthIsOld}}
      - eval_time: 55m
        alertname: TunetoolHealthIsOld
        exp_alerts:
          - exp_labels: {{severity: warning, kind: health, node: n2}}
            exp_annotations:
              summary: n2 has not been checked for 55m 0s
              description: "On the node: systemctl status tunetool-health.timer tunetool-health.service. A drive may hang."
"""


@pytest.fixture(scope="module")
def programs() -> Path:
    try:
        return layer("monitoring") / "usr/bin"
    except NoLayer as error:
        pytest.skip(str(error))


def promtool(programs: Path, *arguments: object, content: str = "") -> str:
    done = call(programs / "promtool", *map(str, arguments), input=content)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_accepts_the_rules_and_they_fire_when_they_must(programs: Path, tmp_path: Path) -> None:
    rules = DOCS / "alerts.yml"
    assert "6 rules found" in promtool(programs, "check", "rules", rules)
    tests = tmp_path / "rules.test.yml"
    tests.write_text(RULE_TESTS.format(rules=rules))
    assert "SUCCESS" in promtool(programs, "test", "rules", tests)


def test_promtool_finds_nothing_wrong_with_the_metrics(programs: Path) -> None:
    promtool(programs, "check", "metrics", content=of_checks("health", "n1", 1.8e9, "fail", CHECKS, 0.25))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(*argv: object, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as stream:
        child = subprocess.Popen([*map(str, argv)], stdout=stream, stderr=stream)
        try:
            yield child
        finally:
            child.terminate()
            child.wait()


def get(port: int, path: str) -> Any:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            text = answer.read().decode()
    except OSError:
        return None
    return json.loads(text) if path.startswith("/api") else text


def query(port: int, expression: str) -> list[dict[str, Any]]:
    answer = get(port, "/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
    result: list[dict[str, Any]] = answer["data"]["result"] if answer else []
    return result


def test_prometheus_scrapes_a_node_and_its_alerts_fire(programs: Path, tmp_path: Path) -> None:
    textfiles, exporter, server = tmp_path / "textfiles", free_port(), free_port()
    textfiles.mkdir()
    page = of_checks("health", "n1", time.time(), "fail", CHECKS, 0.25)
    (textfiles / "tunetool-health.prom").write_text(page)
    config = tmp_path / "prometheus.yml"
    rules = tmp_path / "alerts.yml"
    # The very rules, but without their waits.
    lines = (DOCS / "alerts.yml").read_text().splitlines()
    rules.write_text("\n".join(line for line in lines if not line.strip().startswith("for:")))
    config.write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{rules}]\n"
        f"scrape_configs: [{{job_name: node, static_configs: [{{targets: ['127.0.0.1:{exporter}']}}]}}]\n"
    )
    listen = f"--web.listen-address=127.0.0.1:{exporter}"
    node = [programs / "prometheus-node-exporter", "--collector.disable-defaults", "--collector.textfile", listen]
    storage = [f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{server}"]
    with (
        running(*node, f"--collector.textfile.directory={textfiles}", log=tmp_path / "node.log") as first,
        running(programs / "prometheus", f"--config.file={config}", *storage, log=tmp_path / "server.log") as second,
    ):
        until(lambda: get(exporter, "/metrics"), "node_exporter", first)
        assert "node_textfile_scrape_error 0" in get(exporter, "/metrics")
        until(lambda: query(server, "tunetool_check"), "a scrape", second)
        failing = query(server, "tunetool_check == 1")
        assert [sample["metric"]["check"] for sample in failing] == ["array.members"]
        alerts = 'ALERTS{alertstate="firing"}'
        until(lambda: len(query(server, alerts)) >= 2, "alerts", second)
        assert {sample["metric"]["alertname"] for sample in query(server, alerts)} == {
            "TunetoolNodeIsSick",
            "TunetoolCheckFails",
        }
        # Every question of the dashboard is one that Prometheus understands, and the first ones have an answer.
        dashboard = json.loads((DOCS / "dashboard.json").read_text())
        asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
        assert len(asked) == 9
        for number, expression in enumerate(asked):
            answer = get(
                server, "/api/v1/query?" + urllib.parse.urlencode({"query": expression.replace("$node", "n.*")})
            )
            assert answer is not None, expression
            assert answer["status"] == "success"
            assert answer["data"]["result"] or number >= 7, expression
