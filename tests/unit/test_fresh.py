"""Settings of package clients that `make fresh` gives to a new machine: pip, apt, certificates, proxies."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest

import fresh_node
import settings

pytestmark = pytest.mark.any_python


def test_only_what_package_clients_go_by_is_passed_on() -> None:
    passed_on = {"PIP_INDEX_URL", "https_proxy", "NO_PROXY", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"}
    given = {name: f"the value of {name}" for name in [*passed_on, "HOME", "SECRET_TOKEN", "PATH"]}
    assert settings.environment(given) == {name: given[name] for name in passed_on}


def test_the_settings_of_pip_and_the_folders_that_they_name(tmp_path: Path) -> None:
    for name in ("wheels", "index/simple", "more/simple"):
        (tmp_path / name).mkdir(parents=True)
    values = settings.parse_pip(
        f":env:.find-links='{tmp_path}/wheels https://a/links'\n"
        "global.timeout='60'\n"
        f"global.extra-index-url='file://{tmp_path}/index/simple file://{tmp_path}/more/simple'\n"
        "global.index-url='https://a/simple'\n"
    )
    assert values["timeout"] == "60"
    # The files of an index are beside its pages.
    assert set(settings.folders(values)) == {tmp_path / name for name in ("wheels", "index", "more")}
    text = fresh_node.pip_conf(values, 8080)
    assert text.splitlines()[1:] == [
        f"find-links = http://10.0.2.2:8080{tmp_path}/wheels/ https://a/links",
        "timeout = 60",
        f"extra-index-url = http://10.0.2.2:8080{tmp_path}/index/simple/ http://10.0.2.2:8080{tmp_path}/more/simple/",
        "index-url = https://a/simple",
        "trusted-host = 10.0.2.2:8080 10.0.2.2",
    ]


def test_what_a_node_may_fetch_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/a.whl").write_text("bytes")
    (tmp_path / "secret").write_text("mine")
    with fresh_node.served([tmp_path / "wheels"]) as port:
        base = f"http://127.0.0.1:{port}"

        def get(path: str) -> str:
            with urllib.request.urlopen(f"{base}{path}") as answer:
                return str(answer.read().decode())

        assert 'href="a.whl"' in get(f"{tmp_path}/wheels/")
        assert get(f"{tmp_path}/wheels/a.whl") == "bytes"
        for path in (f"{tmp_path}/secret", f"{tmp_path}/wheels/../secret", "/etc/passwd", "/"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get(path)


def test_a_proxy_on_this_machine_is_elsewhere_for_a_node() -> None:
    given = {"http_proxy": "http://localhost:3128", "https_proxy": "http://u:p@127.0.0.1:1/", "PIP_TIMEOUT": "1"}
    assert fresh_node.variables(given) == {
        "http_proxy": "http://10.0.2.2:3128",
        "https_proxy": "http://u:p@10.0.2.2:1/",
    }
    assert fresh_node.variables({"no_proxy": "localhost.example"}) == {"no_proxy": "localhost.example"}


def test_apt_is_told_the_way_to_the_archive_and_no_hooks(tmp_path: Path) -> None:
    dump = 'Acquire::http::Proxy "http://p:1";\nDPkg::Post-Invoke:: "rm -f x";\nAcquire::Check-Date "false";\n'
    assert settings.apt_lines(dump) == 'Acquire::http::Proxy "http://p:1";\nAcquire::Check-Date "false";\n'
    (tmp_path / "etc/apt/sources.list.d").mkdir(parents=True)
    (tmp_path / "etc/apt/sources.list").write_text("deb http://a/debian bookworm main\n")
    (tmp_path / "etc/apt/sources.list.d/other.list").write_text("deb http://b/other bookworm main\n")
    assert list(settings.apt_sources("bookworm", tmp_path)) == [tmp_path / "etc/apt/sources.list"]
    assert list(settings.apt_sources("trixie", tmp_path)) == []
