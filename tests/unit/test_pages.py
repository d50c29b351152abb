"""Pages: what each kind shows, in which order, that nothing is fetched, and that no text of a record becomes markup."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import shown_records
from builders import measurement, record
from parsed_page import Parsed
from shown_records import all_kinds, fleet, hostile, verified
from tunetool import record as records
from tunetool.cli.main import cli
from tunetool.cli.output import finish
from tunetool.errors import UsageProblem
from tunetool.fleet.groups import read_graph
from tunetool.fleet.view import Dot, dots, nodes_beside, view_of_nodes
from tunetool.measure.session import Result
from tunetool.record import Node, Record, Rung, host_file
from tunetool.report import render_html
from tunetool.report.html import code
from tunetool.report.kinds import page_text, write_any_page, write_page
from tunetool.verdict import CEILING
from tunetool.verify.ladder_view import ladder_picture
from tunetool.verify.view import limits as limits_of_verify
from tunetool.view.curves import Line, plot
from tunetool.view.plots import Bar, bars
from tunetool.view.points import Level, Point, points


def page_of(shown: Record, folder: Path) -> str:
    return write_any_page(shown, records.write(shown, folder)).read_text()


@pytest.mark.parametrize("shown", all_kinds(), ids=lambda shown: str(shown.kind))
def test_a_page_is_whole_and_fetches_nothing(shown: Record, tmp_path: Path) -> None:
    text = page_of(shown, tmp_path)
    parsed = Parsed(text)
    assert len(text.encode()) < 300_000
    assert not any(name in given for _, given in parsed.tags for name in ("src", "href", "style", "srcset"))
    assert "url(" not in text
    assert "@import" not in text
    titles = re.findall("<h2>(.*?)</h2>", text)
    assert titles[-1] == "Provenance"
    if shown.command:
        assert titles[-3:] == ["Evidence", "How to repeat", "Provenance"]
    verdict = text.index('class="verdict') if shown.verdict else 0
    assert verdict < text.index("<h2>")
    images = [given for tag, given in parsed.tags if tag == "svg"]
    assert all(given["role"] == "img" and (given["aria-label"] or "").count(" ") > 3 for given in images)


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "\"'><img src=x onerror=alert(1)>",
        "</style></svg></title></textarea><svg onload=alert(1)>",
        "' onmouseover='alert(1)' x='",
        '" onfocus="alert(1)" autofocus="',
        "{{ 7 * 7 }}{% raw %}&#60;b&#62;",
        "\n]]><!--\r\u2028",
    ],
)
@pytest.mark.parametrize("kind", range(len(all_kinds())), ids=lambda kind: str(all_kinds()[kind].kind))
def test_no_text_of_a_record_becomes_markup(kind: int, text: str, tmp_path: Path) -> None:
    shown = all_kinds()[kind]
    plain = Parsed(page_of(hostile(shown, " x"), tmp_path))
    spoiled = Parsed(page_of(hostile(shown, text), tmp_path))
    assert spoiled.shape() == plain.shape()
    lines = re.sub(r"\s+", " ", spoiled.words)
    assert re.sub(r"\s+", " ", text) in lines


@pytest.mark.parametrize(
    "drawn",
    [
        bars('a "b" <c> \'', [Bar('x " onload="', 2.0, 1.0, 3.0, "#000")]),
        plot('a "b"', "s", [Line("<\"&'", [(0.0, 1.0), (1.0, 2.0)])], 1.0),
        ladder_picture(
            [Rung(name="a", title="<\"'>", kind="array", value=1e9, share=0.5, least=0.9, below="x", loses=True)], 2e9
        ),
        dots('a "b"', [Dot("<\"' onload=x>", 1.0, True)]),
        points(
            'a "b"', 'a "b"', [Point("<\"'>", 1.0, 0.5, 2.0, "#000", pin="<b>", below="&")], [Level("<i>", 3.0)], "<"
        ),
    ],
    ids=["bars", "curves", "ladder", "nodes", "points"],
)
def test_a_picture_is_well_formed_whatever_its_names_are(drawn: str) -> None:
    root = ElementTree.fromstring(drawn)
    assert set(root.attrib) == {
        *("class", "viewBox", "width", "height", "font-family", "font-size", "role", "aria-label"),
    }
    assert '"' in root.attrib["aria-label"]


@given(st.text(alphabet="ab<>&\"'`", max_size=30))
def test_what_stands_in_backticks_is_code_and_text(text: str) -> None:
    read = Parsed(str(code(text)))
    pairs, rest = divmod(text.count("`"), 2)
    assert [tag for tag, _ in read.tags] == ([] if rest else ["code"] * pairs)
    assert read.words == (text if rest else text.replace("`", ""))


def test_a_name_of_any_length_leaves_room_for_its_bar() -> None:
    drawn = bars("x", [Bar("n" * 500, 2.0, 1.0, 3.0, "#000")])
    box = [each for each in ElementTree.fromstring(drawn) if each.tag.endswith("rect")][1]
    assert float(box.attrib["width"]) > 100
    assert float(box.attrib["x"]) + float(box.attrib["width"]) < 760
    assert "n" * 500 in ElementTree.fromstring(drawn).attrib["aria-label"]


def test_the_first_thing_after_the_verdict_is_what_limits() -> None:
    text = page_text(verified(), None)
    assert re.findall("<h2>(.*?)</h2>", text)[:2] == ["What limits", "The ladder"]
    limits = text[text.index("What limits") : text.index("The ladder")]
    assert "slow-drive" in limits
    assert "S005" in limits
    assert "drives.balance" in limits
    whole = page_text(verified(slow=7.0), None)
    assert "no rung of the ladder loses more than is expected of it" in whole
    assert "LOSES" not in whole


@pytest.mark.parametrize(("links", "limit"), [(0.5e9, False), (1.05e9, True), (2e9, False)])
def test_links_limit_only_what_comes_near_them(links: float, limit: bool) -> None:
    known = record(measurement("sequential.read", 1e9), measurement(CEILING, links))
    assert ("read: the drives' links, 95% of what they carry" in [*limits_of_verify(known)]) == limit
    assert any("links" in line for line in limits_of_verify(known)) == limit


def test_the_ladder_marks_the_rung_that_loses_and_the_ceiling() -> None:
    rungs = [
        Rung(name="drive.read", title="drives", kind="alone", value=56e9),
        Rung(
            name="array.read", title="array", kind="array", value=28e9, below="drives", share=0.5, least=0.9, loses=True
        ),
        Rung(name="x", title="checkpoint", kind="checkpoint", skipped="no torch"),
    ]
    root = ElementTree.fromstring(ladder_picture(rungs, 63e9))
    boxes = [each for each in root if each.tag.endswith("rect")][1:]
    first, second = (float(each.attrib["width"]) for each in boxes)
    assert second == pytest.approx(first / 2, abs=0.1)
    assert boxes[0].attrib["fill"] != boxes[1].attrib["fill"]
    dashed, kept = (each for each in root if each.tag.endswith("line"))
    assert float(dashed.attrib["x1"]) - 200 == pytest.approx(first * 63 / 56, abs=0.2)
    assert float(kept.attrib["x1"]) - 200 == pytest.approx(first * 0.9, abs=0.2)
    said = root.attrib["aria-label"]
    assert "array 28.00  keeps 50%, 90% wanted" in said
    assert said.endswith("checkpoint skipped; loses: array")
    # A ceiling far above all rungs is written, and the bars keep their length.
    far = ElementTree.fromstring(ladder_picture(rungs, 630e9))
    assert len([each for each in far if each.tag.endswith("line")]) == 1
    assert "ceiling of the links 630.0" in "".join(far.itertext())


def test_slow_drives_are_marked_beside_the_others() -> None:
    text = page_text(verified(), None)
    rows = [row.split() for row in Parsed(text).rows if row.startswith("S0")]
    assert [row[0] for row in rows] == [f"S{n:03d}" for n in range(8)]
    assert [row[1] == "(slow)" for row in rows] == [n == 5 for n in range(8)]
    assert "Gen5 x4" in text


def test_the_bad_nodes_are_on_top_then_the_slow_ones(tmp_path: Path) -> None:
    shown, nodes, groups = fleet(40)
    text = render_html.page(view_of_nodes(shown, nodes, groups), shown)
    names = [row.split()[0] for row in Parsed(text).rows if row.startswith("node0")]
    assert names[:4] in (
        ["node0017", "node0009", "node0007", "node0023"],
        ["node0017", "node0009", "node0023", "node0007"],
    )
    assert len(names) == 40
    assert names[4:] != sorted(names[4:]), "the others are in the order of their distance from the median"
    limits = text[text.index("What limits") : text.index("<h2>Nodes")]
    assert "1 node: array.state: node0017" in limits
    assert "2 nodes slow among the others: node00" in limits
    assert "the slowest node limits a job on all: node00" in limits
    row = next(row for row in Parsed(text).rows if row.startswith("node0005"))
    assert "kernel" in row
    assert "rack1" in row
    differences = text[text.index("<h2>Differences") :]
    assert "6.8.0-odd" in differences
    assert "number of data drives" in differences


def test_a_thousand_nodes_fit() -> None:
    shown, nodes, groups = fleet(1000)
    text = render_html.page(view_of_nodes(shown, nodes, groups), shown)
    assert len(text.encode()) < 5_000_000
    assert sum(tag == "tr" for tag, _ in Parsed(text).tags) > 1000


def test_a_fleet_s_machines_come_from_its_hosts_own_records(tmp_path: Path) -> None:
    shown, nodes, _ = fleet(6)
    raw = {host_file(name): records.dumps(record(node=each)) for name, each in nodes.items()}
    path = records.write(shown, tmp_path, raw)
    assert nodes_beside(shown, path.parent) == nodes
    broken = path.parent / host_file("node0001")
    broken.write_text("[]")
    (path.parent / host_file("node0002")).unlink()
    (tmp_path / "outside.json").write_text(raw[host_file("node0002")])
    (path.parent / host_file("node0002")).symlink_to(tmp_path / "outside.json")
    (path.parent / host_file("node0003")).write_text('{"node": {"host": 1}}')
    assert set(nodes_beside(shown, path.parent)) == {"node0004", "node0005", "node0006"}
    assert write_page(shown, path) == path.parent / "report.html"


GRAPH = """\
@all:
  |--@ungrouped:
  |  |--alone
  |--@gpu:
  |  |--@rack1:
  |  |  |--n1
  |  |  |--n2
  |  |--@rack2:
  |  |  |--n3
  |--@new:
  |  |--n1
"""


def test_racks_are_groups_of_the_inventory() -> None:
    assert read_graph(GRAPH) == {
        "alone": [],
        "n1": ["gpu", "rack1", "new"],
        "n2": ["gpu", "rack1"],
        "n3": ["gpu", "rack2"],
    }


def test_ansible_s_own_graph_is_read(tmp_path: Path) -> None:
    pytest.importorskip("ansible_runner", reason="Ansible's control side needs Python 3.11")
    from tunetool.fleet.groups import groups_of

    inventory = tmp_path / "hosts.ini"
    inventory.write_text("[rack1]\nn[1:2]\n[rack2]\nn3\n[gpu:children]\nrack1\nrack2\n[gpu:vars]\nsecret=x\n")
    assert groups_of(inventory) == {"n1": ["gpu", "rack1"], "n2": ["gpu", "rack1"], "n3": ["gpu", "rack2"]}
    with pytest.raises(UsageProblem, match="does not exist"):
        groups_of(tmp_path / "none")


def call(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(cli, ["report", *map(str, arguments)], standalone_mode=False)
    if code == 0:
        assert done.exception is None, done.exception
        return done.stdout
    assert isinstance(done.exception, UsageProblem)
    return done.exception.message


def test_report_page_writes_any_record_and_prints_its_path(tmp_path: Path) -> None:
    paths = [records.write(shown, tmp_path) for shown in all_kinds()]
    written = call("page", *(path.parent.name for path in paths), "--runs-dir", tmp_path).splitlines()
    assert written == [str(path.parent / "report.html") for path in paths]
    assert all(Path(path).read_text().startswith("<!doctype html>") for path in written)
    assert "is not a record" in call("page", "none", "--runs-dir", tmp_path, code=2)


def test_report_fleet_takes_a_fleet_s_record_or_those_of_nodes(tmp_path: Path) -> None:
    path = records.write(fleet(6)[0], tmp_path)
    assert call("fleet", path, "--runs-dir", tmp_path) == f"{path.parent}/report.html\n"
    good, bad = verified(slow=7.0), verified()
    single = [
        records.write(each.model_copy(update={"node": shown_records.node(name)}), tmp_path)
        for name, each in (("a", good), ("b", bad), ("c", good))
    ]
    output = tmp_path / "fleet.html"
    assert call("fleet", *single, "-o", output, "--runs-dir", tmp_path) == f"{output}\n"
    rows = [row.split()[0] for row in Parsed(output.read_text()).rows if row.split()[1] in ("PASS", "FAIL")]
    assert rows == ["b", "a", "c"]
    assert "several records have one page" in call("fleet", *single, "--runs-dir", tmp_path, code=2)
    assert "is of one node" in call("fleet", single[0], "--runs-dir", tmp_path, code=2)
    assert "not of one kind" in call("fleet", single[0], path, "-o", output, "--runs-dir", tmp_path, code=2)


def test_the_provenance_names_version_commit_hash_and_machine() -> None:
    text = page_text(verified(), None)
    provenance = Parsed(text[text.index("<h2>Provenance") :]).words
    for words in ("0.1.0 commit cccc", "sha256 5555", "AMD EPYC 9654, 192 cores", "8 x KCD8XPUG7T68 0106", "fio 3.33"):
        assert words in provenance
    assert "tunetool verify --level full --expect 50GBps" in text


def test_a_record_without_anything_has_a_page_too(tmp_path: Path) -> None:
    text = page_of(record(kind="something.new"), tmp_path)
    assert "something.new on n1" in text
    assert "<table" not in text
    single = page_of(record(measurement("x", 0.0, "ratio"), kind="something.new"), tmp_path)
    assert single.count("<svg") == 1


def test_a_health_check_has_a_page_for_who_asks(tmp_path: Path) -> None:
    checked = verified().model_copy(update={"measurements": [], "ladder": None, "expectations": []})
    path = records.write(checked, tmp_path)
    assert write_page(checked, path) is None
    assert "drives.balance" in write_any_page(checked, path).read_text()


def test_records_of_one_directory_have_a_page_each(tmp_path: Path) -> None:
    # As those of a fleet's hosts.
    shown = {name: verified().model_copy(update={"node": Node(host=name)}) for name in ("node1", "node2")}
    for name, each in shown.items():
        (tmp_path / f"{name}.json").write_text(records.dumps(each))
    done = CliRunner().invoke(cli, ["report", "page", *(str(tmp_path / f"{name}.json") for name in shown)])
    assert done.exit_code == 0, done.output
    pages = [Path(line) for line in done.output.splitlines()]
    assert pages == [tmp_path / "node1.html", tmp_path / "node2.html"]
    assert ["Storage of node1" in page.read_text() for page in pages] == [True, False]


def test_a_page_that_cannot_be_written_changes_no_verdict(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shown = verified()
    path = records.write(shown, tmp_path)
    assert finish(Result(shown, path), None) == 1
    assert capfd.readouterr().err.splitlines()[-1] == f"page: {path.parent}/report.html"
    (path.parent / "report.html").unlink()
    (path.parent / "report.html").mkdir()
    assert finish(Result(shown, path), None) == 1
    said = capfd.readouterr()
    assert said.out.splitlines()[-1].startswith("FAIL")
    assert said.err.startswith("no page was written: ")
