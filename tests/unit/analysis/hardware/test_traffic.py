"""Bytes per step, measured and expected."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ddpcheck.analysis.hardware.traffic import ring_share
from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.reports.json_report import to_json
from ddpcheck.reports.terminal.report import Detail, render
from tests.helpers.cluster import BYTES, Cluster, Interface

GPU_FACTS = {
    "nvml": {
        "note": "",
        "driver": "570",
        "gpus": [
            {"index": 0, "name": "x", "memory": 9, "clock": 5, "pcie": [5, 16], "nvlinks": [0], "mig": []}
        ],
        "topology": [["X"]],
        "p2p": [[True]],
    }
}
GPU_SAMPLES = {
    "gpus": [
        {"busy": 5, "ecc": [0, 0], "memory": 7, "clock": 4, "pcie_link": [5, 8], "throttled": 4, "power": 8}
    ]
}


def traffic(cluster: Cluster) -> dict[str, Any]:
    cluster.build()
    return dict(analyse_run(cluster.folder).traffic)


def lan(number: int, a_second: float = BYTES) -> list[Interface]:
    loopback = Interface("lo", 3.0, addresses=["127.0.0.1/8"], loopback=True)
    return [loopback, Interface("eth0", a_second, 1000, [f"10.0.0.{number + 1}/24"])]


@pytest.mark.parametrize(("ranks", "share"), [(1, 0.0), (2, 1.0), (4, 1.5), (8, 1.75), (0, 0.0)])
def test_bytes_that_each_rank_of_a_ring_sends(ranks: int, share: float) -> None:
    assert ring_share(ranks) == share


def test_two_nodes_of_one_rank(tmp_path: Path) -> None:
    table = traffic(Cluster(tmp_path, [lan(0), lan(1)]))
    assert (table["gradient_bytes"], table["expected"], table["why_not"]) == (BYTES, 2 * BYTES, "")
    assert [node["host"] for node in table["nodes"]] == ["node0", "node1"]
    node = table["nodes"][1]
    assert (node["ranks"], node["steps"], node["seconds"]) == ([1], 59.0, 59.0)
    assert node["classes"]["network"] == {"sent": BYTES, "received": BYTES, "expected": BYTES}
    assert node["classes"]["loopback"] == {"sent": 3, "received": 3, "expected": 0}
    assert node["links"][1] == {
        "class": "network",
        "name": "eth0",
        "sent": BYTES,
        "received": BYTES,
        "speed": 1000,
    }


def test_the_ring_leaves_a_node_once(tmp_path: Path) -> None:
    table = traffic(Cluster(tmp_path, [lan(0), lan(1)], per_node=4))
    share = round(1.75 * BYTES)
    for node in table["nodes"]:
        assert node["classes"]["network"]["expected"] == share
        assert node["classes"]["loopback"]["expected"] == 3 * share
    assert table["expected"] == 8 * share


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"reductions": 0.5}, 0.5),  # no_sync at every second step
        ({"reductions": 2.0}, 2.0),
        ({"reductions": None}, 1.0),
        ({"dtype": "bfloat16"}, 0.5),
        ({"dtype": "float64"}, 2.0),
    ],
)
def test_gradients_that_are_sent(tmp_path: Path, options: dict[str, Any], factor: float) -> None:
    table = traffic(Cluster(tmp_path, [lan(0), lan(1)], **options))
    assert table["gradient_bytes"] == factor * BYTES


def test_a_hook_decides_what_is_sent(tmp_path: Path) -> None:
    table = traffic(Cluster(tmp_path, [lan(0), lan(1)], hook="fp16_compress_hook"))
    assert table["expected"] is None
    assert "fp16_compress_hook" in table["why_not"]
    assert table["nodes"][0]["classes"]["network"]["expected"] is None
    assert table["nodes"][0]["classes"]["network"]["sent"] == BYTES


def test_nccl_inside_a_node_takes_what_is_there(tmp_path: Path) -> None:
    table = traffic(Cluster(tmp_path, [lan(0), lan(1)], per_node=2, backend="nccl"))
    classes = table["nodes"][0]["classes"]
    assert classes["network"]["expected"] == round(1.5 * BYTES)
    assert classes["loopback"]["expected"] is None


def test_gpus(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, [lan(0)])
    cluster.build()
    path = tmp_path / "node-node0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "sample":
            passed = line["time"] - 1000
            links = [[round(100 * passed)] * 3, [round(200 * passed)] * 3]
            line["gpus"] = [{"nvlink": links, "pcie": [round(10 * passed), 0], "processes": {"100": 5}}]
            line["gpus"] += [{"pcie_rate": [70, 80]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    [node] = analyse_run(tmp_path).traffic["nodes"]
    by_name = {(link["class"], link["name"]): (link["sent"], link["received"]) for link in node["links"]}
    assert by_name["nvlink", "GPU 0"] == (300, 600)
    assert by_name["pcie", "GPU 0"] == (10, 0)
    assert by_name["pcie", "GPU 1"] == (70, 80)


def test_short_jobs_are_not_measured(tmp_path: Path) -> None:
    table = traffic(Cluster(tmp_path, [lan(0), lan(1)], steps=8))
    assert table["nodes"] == []
    assert table["why_not"] == "fewer than 10 steps between two samples"


def test_two_launchers_of_one_host_count_once(tmp_path: Path) -> None:
    Cluster(tmp_path, [lan(0)], per_node=2).build()
    path = tmp_path / "node-node0.jsonl"
    twice = path.read_text() + path.read_text().replace('"pid":10,', '"pid":11,')
    path.write_text(twice)
    report = analyse_run(tmp_path)
    assert len(report.hardware["nodes"]) == len(report.traffic["nodes"]) == 1


def test_without_samples_there_is_nothing(tmp_path: Path) -> None:
    Cluster(tmp_path, [lan(0)]).build()
    (tmp_path / "node-node0.jsonl").write_text('{"kind":"node","host":"node0","pid":1}\n')
    report = analyse_run(tmp_path)
    assert (report.hardware, report.traffic) == ({}, {})


def test_damaged_logs_do_not_prevent_the_report(tmp_path: Path) -> None:
    """Values of a log are replaced at random."""
    cluster = Cluster(tmp_path, [lan(0), lan(1)], steps=20, more_samples=GPU_SAMPLES)
    cluster.more_facts = GPU_FACTS
    cluster.build()
    path = tmp_path / "node-node0.jsonl"
    log = path.read_text()
    dice = random.Random(5)
    for _ in range(20):
        lines = [json.loads(line) for line in log.splitlines()]
        path.write_text("".join(json.dumps(_spoilt(line, dice)) + "\n" for line in lines))
        report = analyse_run(tmp_path)
        assert [finding.code for finding in report.findings if finding.code == "DDP605"] == []
        render(report, Console(file=io.StringIO()), detail=Detail.ALL)
        to_json(report)


def _spoilt(value: Any, dice: random.Random) -> Any:
    if dice.random() < 0.05:
        return dice.choice([None, "x", -1, 1.5, [], {}, [1], {"a": 1}, True, 10**30])
    if isinstance(value, dict):
        return {key: item if key == "kind" else _spoilt(item, dice) for key, item in value.items()}
    return [_spoilt(item, dice) for item in value] if isinstance(value, list) else value
