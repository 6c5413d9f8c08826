"""DDP403: the link of one node has a lower throughput than the others."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.report import Report
from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.reports.html.page import to_html
from ddpcheck.reports.json_report import from_json, to_json
from ddpcheck.reports.terminal.report import Detail, render
from tests.helpers.cluster import Cluster, Interface
from tests.helpers.paths import ROOT

SCHEMA = ROOT / "docs" / "report.schema.json"
USUAL = 800.0


def address(node: int) -> str:
    return f"10.0.0.{node + 1}"


def lan(count: int) -> list[list[Interface]]:
    return [[Interface("eth0", 1.0, 1000, [f"{address(node)}/24"])] for node in range(count)]


def ring(count: int, slow: dict[tuple[int, int], float]) -> dict[int, dict[str, tuple[float, float]]]:
    """A ring: all links carry the same amount and wait for the slowest."""
    least = min([USUAL, *slow.values()])
    pairs = [(node, (node + 1) % count) for node in range(count)]
    rates = {pair: slow.get(pair, USUAL) for pair in pairs}
    return {a: {address(b): (rates[a, b], 0.5 * least / rates[a, b])} for a, b in pairs}


def around(node: int, count: int, rate: float) -> dict[tuple[int, int], float]:
    return {((node - 1) % count, node): rate, (node, (node + 1) % count): rate}


def cluster(folder: Path, count: int, slow: dict[tuple[int, int], float], **options: Any) -> Cluster:
    given = {"sends": ring(count, slow), "wait": 600_000, "steps": 30, **options}
    return Cluster(folder, lan(count), **given)


def report_of(job: Cluster) -> Report:
    job.build()
    return analyse_run(job.folder)


def slow_findings_of(job: Cluster) -> list[Finding]:
    """Without the note on healthy links that limit the job."""
    return [finding for finding in findings_of(job) if finding.severity.value != "note"]


def findings_of(job: Cluster) -> list[Finding]:
    return [finding for finding in report_of(job).findings if finding.code == "DDP403"]


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("factor", [2, 4, 10])
def test_the_node_is_named_with_figures_and_cost(tmp_path: Path, count: int, factor: float) -> None:
    [finding] = findings_of(cluster(tmp_path, count, around(2, count, USUAL / factor)))
    assert (finding.severity.value, finding.ranks, finding.evidence["nodes"]) == ("warning", (2,), ["node2"])
    assert finding.evidence["megabits"] == pytest.approx(USUAL / factor, rel=0.01)
    assert finding.evidence["usual_megabits"] == pytest.approx(USUAL, rel=0.01)
    assert finding.evidence["factor"] == pytest.approx(factor, rel=0.01)
    # Busy for half of each second, and a link like the others would have been so for less.
    assert finding.evidence["cost_ms"] == pytest.approx(500 * (1 - 1 / factor), rel=0.02)
    assert finding.message.startswith(
        f"The link of node2 to the other nodes is slow: {USUAL / factor:.3g} Mbit/s"
    )
    assert "of a 1000.0 ms step" in finding.message


def test_one_slow_direction_reports_both_ends(tmp_path: Path) -> None:
    [finding] = findings_of(cluster(tmp_path, 4, {(1, 2): 100.0}))
    assert (finding.evidence["nodes"], finding.ranks) == (["node1", "node2"], (1, 2))
    assert finding.message.startswith("The link from node1 to node2 is slow: 100 Mbit/s")


def test_a_cost_hidden_by_the_backward_is_a_note(tmp_path: Path) -> None:
    [finding] = findings_of(cluster(tmp_path, 4, around(2, 4, 100.0), wait=20_000))
    assert finding.severity.value == "note"
    assert finding.evidence["cost_ms"] == pytest.approx(20, abs=1)


def test_without_clocks_the_cost_is_not_known(tmp_path: Path) -> None:
    [finding] = findings_of(cluster(tmp_path, 4, around(2, 4, 100.0), wait=0))
    assert (finding.severity.value, finding.evidence["cost_ms"]) == ("warning", None)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_equal_links_raise_nothing(tmp_path: Path, count: int) -> None:
    assert slow_findings_of(cluster(tmp_path, count, {})) == []


def test_of_two_nodes_one_direction_is_compared_with_the_other(tmp_path: Path) -> None:
    [finding] = findings_of(cluster(tmp_path / "a", 2, {(0, 1): 100.0}))
    assert (finding.severity.value, finding.evidence["nodes"]) == ("warning", ["node0", "node1"])
    # Less than twice as fast: the directions may differ by chance.
    assert slow_findings_of(cluster(tmp_path / "b", 2, {(0, 1): 0.6 * USUAL})) == []
    # Both directions are slow: nothing says that they should be faster.
    assert slow_findings_of(cluster(tmp_path / "c", 2, {(0, 1): 100.0, (1, 0): 100.0})) == []


def bound_of(folder: Path, speed: int | None, **options: Any) -> Finding:
    """Two nodes with healthy links, which are busy for half of each step of one second."""
    job = cluster(folder, 2, {}, **options)
    for interfaces in job.nodes:
        interfaces[0].speed = speed
    [finding] = findings_of(job)
    return finding


def test_healthy_links_that_limit_the_job(tmp_path: Path) -> None:
    finding = bound_of(tmp_path, 1000)
    assert (finding.severity.value, finding.ranks) == ("note", (0, 1))
    evidence = finding.evidence
    assert (evidence["interface"], evidence["card_megabits"]) == ("eth0", 1000)
    assert evidence["megabits"] == pytest.approx(USUAL, rel=0.01)
    assert evidence["bytes_a_step"] == pytest.approx(0.5 * USUAL * 125_000, rel=0.01)
    # Half a second of a step of one second.
    assert evidence["busy_ms"] == pytest.approx(500, rel=0.02)
    assert evidence["factor"] == pytest.approx(2.0, rel=0.02)
    # The same share of a faster card: 400 Mbit take 20 ms at 0.8 of 25 Gbit/s.
    assert evidence["expected_ms"] == {
        "2.5": pytest.approx(700, rel=0.02),
        "10": pytest.approx(550, rel=0.02),
        "25": pytest.approx(520, rel=0.02),
    }
    assert "0.8 of its 1 Gbit/s" in finding.message


def test_a_link_far_below_the_rate_of_its_card(tmp_path: Path) -> None:
    finding = bound_of(tmp_path, 10_000)
    assert "0.08 of its 10 Gbit/s" in finding.message
    assert "slower than the card" in finding.cause
    assert list(finding.evidence["expected_ms"]) == ["25", "100", "400"]


def test_a_card_that_does_not_state_its_rate(tmp_path: Path) -> None:
    finding = bound_of(tmp_path, None)
    assert (finding.evidence["interface"], finding.evidence["card_megabits"]) == ("eth0", None)
    assert finding.evidence["expected_ms"]["10"] < finding.evidence["expected_ms"]["2.5"] < 1000


@pytest.mark.parametrize(
    "options",
    [
        # Ranks hardly wait: the backward hides the transfers, or they wait for a slow host.
        {"wait": 150_000},
        # No step was timed.
        {"wait": 0},
        # Too few steps.
        {"steps": 8},
    ],
)
def test_links_that_do_not_limit_the_job(tmp_path: Path, options: dict[str, Any]) -> None:
    assert findings_of(cluster(tmp_path, 2, {}, **options)) == []


def test_waits_that_the_transfers_do_not_explain(tmp_path: Path) -> None:
    """Ranks wait for 600 ms of a step, and the link is busy for 200 ms."""
    sends = {0: {address(1): (USUAL, 0.2)}, 1: {address(0): (USUAL, 0.2)}}
    assert findings_of(cluster(tmp_path, 2, {}, sends=sends)) == []


def test_traffic_to_other_hosts_does_not_count(tmp_path: Path) -> None:
    """A rank that uploads its checkpoints over a slow line."""
    sends = ring(4, {})
    sends[1]["192.0.2.9"] = (20.0, 0.9)
    report = report_of(cluster(tmp_path, 4, {}, sends=sends))
    assert [one for one in report.findings if one.code == "DDP403" and one.severity.value != "note"] == []
    assert {link["target"] for link in report.links["links"]} == {f"node{node}" for node in range(4)}


def test_addresses_that_every_host_has_are_ignored(tmp_path: Path) -> None:
    job = cluster(tmp_path, 3, {})
    for interfaces in job.nodes:
        interfaces.append(Interface("docker0", 0.0, None, ["172.17.0.1/16"]))  # type: ignore[attr-defined]
    job.sends[1]["172.17.0.1"] = (5.0, 0.9)  # type: ignore[index]
    assert len(report_of(job).links["links"]) == 3


def test_clocks_of_hosts_that_are_far_apart(tmp_path: Path) -> None:
    job = cluster(tmp_path, 3, around(2, 3, 100.0))
    job.build()
    for path in (tmp_path / "node-node1.jsonl", tmp_path / "rank-00001.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if "time" in line:
                line["time"] += 5000.0
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    [finding] = [one for one in analyse_run(tmp_path).findings if one.code == "DDP403"]
    assert finding.evidence["nodes"] == ["node2"]


def test_nodes_without_a_shared_folder_are_compared_after_a_merge(tmp_path: Path) -> None:
    """Each node records one link; together they show the slow one."""
    job = cluster(tmp_path / "merged", 3, around(2, 3, 100.0))
    job.build()
    alone = tmp_path / "alone"
    shutil.copytree(job.folder, alone)
    for path in [*alone.glob("node-node[12].jsonl"), *alone.glob("rank-0000[12].jsonl")]:
        path.unlink()
    assert [one.code for one in analyse_run(alone).findings if one.code == "DDP403"] == []
    assert [one.code for one in analyse_run(job.folder).findings if one.code == "DDP403"] == ["DDP403"]


@pytest.mark.parametrize("own_ranks", [True, False])
def test_two_launchers_on_a_node(tmp_path: Path, own_ranks: bool) -> None:
    """Records of both nodes count once; those of each node's own ranks count too."""
    cluster(tmp_path, 3, around(2, 3, 100.0)).build()
    path = tmp_path / "node-node1.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["pid"] = 99
        if own_ranks and "ranks" in line:
            line["ranks"] = {"7": [107, 1, 1, 1]}
    path.write_text(path.read_text() + "".join(json.dumps(line) + "\n" for line in lines))
    report = analyse_run(tmp_path)
    assert len(report.links["links"]) == (4 if own_ranks else 3)
    assert [one.evidence["nodes"] for one in report.findings if one.code == "DDP403"] == [["node2"]]


PORT = [10_000_000, 10_000_000, 0, 100]


@pytest.mark.parametrize(
    ("outliers", "severity", "output"),
    [
        ((50_000, PORT), "warning", "runs at 50 Gbit/s, the others at 200 Gbit/s (median)"),
        ((200_000, [*PORT[:2], 7, 100]), "warning", "errors while the job ran, the others 0"),
        ((200_000, [*PORT[:2], 0, 5_000_000]), "note", "had data but could not send it 50000 times as often"),
    ],
    ids=["rate", "errors", "waiting"],
)
def test_an_infiniband_port_that_is_an_outlier(
    tmp_path: Path, outliers: tuple[int, list[int]], severity: str, output: str
) -> None:
    ports = dict.fromkeys(range(4), (200000, PORT)) | {2: outliers}
    [finding] = findings_of(Cluster(tmp_path, lan(4), ports=ports, steps=30))
    assert (finding.severity.value, finding.ranks) == (severity, (2,))
    assert finding.message.startswith("InfiniBand port mlx5_0/1 of node2 ")
    assert output in finding.message


@pytest.mark.parametrize(
    "ports",
    [
        pytest.param([(200_000, PORT)] * 4, id="all alike"),
        pytest.param([(200_000, PORT)] * 2 + [(100_000, PORT)] * 2, id="two generations"),
        pytest.param([(200_000, PORT)] * 3 + [(50_000, [9, 9, 9, 9])], id="one that is not used"),
        pytest.param(
            [(200_000, [*PORT[:2], 5, 9])] * 2 + [(200_000, [*PORT[:2], 9, 9])] * 2, id="errors on all"
        ),
        pytest.param([(200_000, PORT), (200_000, [*PORT[:2], 0, 5_000_000])], id="waiting, of two"),
        pytest.param([(50_000, PORT)], id="one node"),
    ],
)
def test_ports_that_raise_nothing(tmp_path: Path, ports: list[tuple[int, list[int]]]) -> None:
    assert findings_of(Cluster(tmp_path, lan(len(ports)), ports=dict(enumerate(ports)), steps=30)) == []


def test_reports_show_the_links(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    ports = dict.fromkeys(range(4), (200000, PORT))
    report = report_of(cluster(tmp_path, 4, around(2, 4, 80.0), ports=ports))
    text = to_json(report)
    jsonschema.validate(json.loads(text), json.loads(SCHEMA.read_text()))
    assert from_json(text).links == report.links
    assert report.links["slow"]["nodes"] == ["node2"]
    buffer = io.StringIO()
    render(report, Console(file=buffer, width=80), detail=Detail.ALL)
    output = buffer.getvalue()
    assert max(cell_len(line) for line in output.splitlines()) <= 80
    rows = [" ".join(line.split()) for line in output.splitlines()]
    assert any(row.startswith("node1 node2 80 Mbit/s 50 %") for row in rows)
    assert any(row.startswith("node0 mlx5_0/1 200 Gbit/s") for row in rows)
    page = to_html(report)
    assert "Slowdown of each link" in page
    assert "10.0.0.2 to 10.0.0.3" in page
    assert "node2 is slow: 80 Mbit/s while busy" in page


def test_one_node_has_no_links(tmp_path: Path) -> None:
    assert report_of(Cluster(tmp_path, lan(1), per_node=2)).links == {}
