"""A training run reports which host's link is slow. `tests/lab/slow_link_trials.py` runs many more trials."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import BIN, environment
from tests.helpers.fork_server import prepared
from tests.helpers.paths import JOBS
from tests.helpers.watched_run import run_to_end
from tests.lab.host import Host
from tests.lab.lab import Ended, Lab, make_lab

pytestmark = [pytest.mark.slow, pytest.mark.needs("lab")]

USUAL, SLOW = 200, 50


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with make_lab(3, tmp_path_factory.mktemp("hosts")) as hosts:
        for host in hosts.hosts:
            host.limit_link(USUAL)
        yield hosts


def train(lab: Lab, out: object, steps: int, port: int) -> list[Ended]:
    nodes = len(lab.hosts)

    def launch(number: int, host: Host) -> list[object]:
        job = prepared(JOBS / "nodes.py", "--nnodes", nodes, "--node-rank", number, "--pace", 0.03)
        watch = ["--out", out, "--sample-hz", 5, "--fail-on", "never"]
        return [BIN / "ddpcheck", "run", *watch, "--", *job, "--steps", steps]

    def env(number: int, host: Host) -> dict[str, str]:
        return environment(MASTER_ADDR="node0", MASTER_PORT=str(port))

    ended = lab.run_all(launch, env=env)
    assert [one.status for one in ended] == [0] * nodes, "\n".join(map(str, ended))
    return ended


def report_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "report.json").read_text()))


def slow_findings(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [finding for finding in report["findings"] if finding["code"] in ("DDP402", "DDP403")]


def test_equal_links_raise_nothing(lab: Lab, tmp_path: Path) -> None:
    train(lab, tmp_path / "run", steps=60, port=29731)
    report = report_in(tmp_path / "run")
    assert [one["code"] for one in slow_findings(report) if one["severity"] != "note"] == []
    links = report["links"]["links"]
    assert sorted((link["source"], link["target"]) for link in links) == [
        ("node0", "node2"),
        ("node1", "node0"),
        ("node2", "node1"),
    ]
    # 4/3 of 1 MiB: the gradients and nothing else.
    for link in links:
        assert link["bytes"] / link["steps"] == pytest.approx(4 / 3 * 2**20, rel=0.15)
        assert link["bandwidth"] * 8e-6 < 1.3 * USUAL


def test_a_slow_link_is_found_in_the_merged_run(lab: Lab, tmp_path: Path) -> None:
    lab[2].limit_link(SLOW)
    try:
        train(lab, "run", steps=30, port=29732)
    finally:
        lab[2].limit_link(USUAL)
    folders = [host.folder / "run" for host in lab.hosts]
    # Each node measures only what it sends.
    assert [slow_findings(report_in(folder)) for folder in folders] == [[], [], []]
    merged = run_to_end([BIN / "ddpcheck", "merge", *folders, "--out", tmp_path / "whole"], tmp_path, {})
    [finding] = slow_findings(report_in(tmp_path / "whole"))
    assert (finding["code"], finding["severity"], finding["ranks"]) == ("DDP403", "warning", [2]), str(merged)
    evidence = finding["evidence"]
    assert evidence["nodes"] == ["node2"]
    assert evidence["megabits"] == pytest.approx(SLOW, rel=0.3)
    assert evidence["factor"] > 2
    # 11 Mbit take 0.22 s on the slow link and 0.06 s on the others.
    assert evidence["cost_ms"] == pytest.approx(170, rel=0.35)


def test_two_nodes(tmp_path: Path) -> None:
    """The report names the link as the cost, and a slow direction of it if there is one."""
    with make_lab(2, tmp_path / "hosts") as pair:
        for host in pair.hosts:
            host.limit_link(USUAL)
        train(pair, tmp_path / "healthy", steps=40, port=29733)
        pair[1].limit_sending(SLOW)
        train(pair, tmp_path / "slow", steps=40, port=29734)
    [note] = [one for one in slow_findings(report_in(tmp_path / "healthy")) if one["code"] == "DDP403"]
    assert note["severity"] == "note"
    # 1 MiB takes 42 ms at 200 Mbit/s.
    assert note["evidence"]["bytes_a_step"] == pytest.approx(2**20, rel=0.15)
    assert note["evidence"]["busy_ms"] > 40
    steps = [note["evidence"]["step_ms"], *note["evidence"]["expected_ms"].values()]
    assert steps == sorted(steps, reverse=True)
    [finding] = [one for one in slow_findings(report_in(tmp_path / "slow")) if one["code"] == "DDP403"]
    assert finding["evidence"]["nodes"] == ["node1", "node0"]
    assert finding["evidence"]["megabits"] == pytest.approx(SLOW, rel=0.3)
