"""Traffic and hardware on the terminal and on the page."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console

from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.reports.html.page import to_html
from ddpcheck.reports.terminal.report import Detail, render
from tests.helpers.cluster import BYTES, Cluster, Interface

GPU = {"memory": 1 << 30, "busy": 40, "clock": 900, "temperature": 71, "power": 250_500, "pcie_link": [4, 8]}


def shown(cluster: Cluster) -> str:
    cluster.build()
    buffer = io.StringIO()
    render(analyse_run(cluster.folder), Console(file=buffer, width=80), detail=Detail.ALL)
    text = buffer.getvalue()
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    return text


def lan(count: int) -> list[list[Interface]]:
    return [[Interface("eth0", 1.02 * BYTES, 1000, [f"10.0.0.{n + 1}/24"])] for n in range(count)]


def gpu_facts(**more: Any) -> dict[str, Any]:
    gpu = {"index": 0, "name": "H", "pcie": [5, 16], "memory": 80 << 30, **more}
    return {"nvml": {"driver": "570", "gpus": [gpu]}}


def test_without_a_driver_there_is_one_quiet_line(tmp_path: Path) -> None:
    facts = {"nvml": {"note": "no NVIDIA driver on this node"}}
    text = shown(Cluster(tmp_path, lan(2), more_facts=facts))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "node0 network eth0 1.1 MB 1.1 MB 1.0 MB 102 % 59" in rows
    assert any(row.startswith("node1 50 % 8 1.1 GB 68.7 GB") for row in rows)
    assert "no NVIDIA driver" in text
    assert "DDP605" not in text


def test_gpus_and_their_warnings(tmp_path: Path) -> None:
    samples = {"gpus": [{**GPU, "throttled": 0x44, "ecc": [3, 2], "nvlink": [[5], [6]], "pcie": [7, 8]}]}
    text = shown(Cluster(tmp_path, lan(1), more_facts=gpu_facts(mig=[{}, {}]), more_samples=samples))
    cells = [" ".join(line.split()) for line in text.splitlines()]
    assert "0 1.1 GB 40 % 900 MHz 71 C 250 W 5 B 7 B" in cells
    for remark in (
        "power cap in 100 % of the samples",
        "hardware thermal slowdown in 100 % of the samples",
        "3 corrected memory errors",
        "2 uncorrected memory errors",
        "PCIe runs x8 of x16",
        "cut in 2 MIG slices",
    ):
        assert f"  GPU 0: {remark}\n" in text


def test_the_page_shows_gpus_links_processes_and_connections(tmp_path: Path) -> None:
    gpus = [{"index": n, "name": "H", "pcie": [5, 16], "nvlinks": [0, 4]} for n in (2, 3)]
    facts = {"nvml": {"driver": "570", "gpus": gpus, "topology": [["X", "NV2"], ["NV2", "X"]]}}
    sample = {
        **GPU,
        "throttled": 0x40,
        "nvlink": [[5000, 6000], [7000, 8000]],
        "processes": {"100": 4096, "9": None},
    }
    cluster = Cluster(tmp_path, lan(1), more_facts=facts, more_samples={"gpus": [sample, GPU]})
    cluster.build()
    report = analyse_run(tmp_path)
    [node] = report.hardware["nodes"]
    assert node["gpus"][0]["nvlink_by_link"] == [
        {"link": 0, "sent": 5000, "received": 7000},
        {"link": 4, "sent": 6000, "received": 8000},
    ]
    assert node["gpus"][0]["processes"] == [
        {"pid": 9, "rank": None, "most": 0},
        {"pid": 100, "rank": 0, "most": 4096},
    ]
    assert (node["ranks"]["0"]["gpus"], node["ranks"]["0"]["gpu_memory"]) == ([2], 4096)
    page = to_html(report)
    for part in (
        "GPU 2: hardware thermal slowdown in 100 % of the samples",
        "GPU 2, 3: PCIe runs x8 of x16",
        "4.0 x8 of 5.0 x16",
        "GPU topology of node0",
        "<td>NV2</td>",
        "Memory by process",
        "<td>rank 0</td>",
        '<td class="number">4</td><td class="number">6.0 kB</td><td class="number">8.0 kB</td>',
    ):
        assert part in page, part


def test_many_gpus_are_folded_but_their_warnings_are_not(tmp_path: Path) -> None:
    gpus = [{"index": n, "name": "H", "pcie": [4, 8]} for n in range(65)]
    samples = {"gpus": [{**GPU, "throttled": 0x40}] + [GPU] * 64}
    Cluster(
        tmp_path, lan(1), more_facts={"nvml": {"driver": "570", "gpus": gpus}}, more_samples=samples
    ).build()
    page = to_html(analyse_run(tmp_path))
    assert "All 65 GPUs" in page
    assert "GPU 0: hardware thermal slowdown in 100 %" in page


def test_a_driver_that_is_silent_for_a_while(tmp_path: Path) -> None:
    """Samples without GPUs are no samples of GPUs at rest."""
    samples = {"gpus": [{**GPU, "busy": 80, "nvlink": [[5], [6]]}]}
    Cluster(tmp_path, lan(1), more_facts=gpu_facts(nvlinks=[0]), more_samples=samples).build()
    path = tmp_path / "node-node0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[20:30]:
        del line["gpus"]
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    [node] = analyse_run(tmp_path).hardware["nodes"]
    [gpu] = node["gpus"]
    assert (gpu["busy"]["mean"], gpu["nvlink"]["sent"]) == (80, 5)
    [series] = node["series"]["gpus"]
    assert series["busy"].count(None) > 0
    assert max(series["nvlink_sent"]) == 0


def test_unreadable_values_are_not_zero(tmp_path: Path) -> None:
    Cluster(tmp_path, lan(1)).build()
    path = tmp_path / "node-node0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.pop("cpu", None)
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    report = analyse_run(tmp_path)
    assert report.hardware["nodes"][0]["cpu"] is None
    buffer = io.StringIO()
    render(report, Console(file=buffer, width=80), detail=Detail.ALL)
    assert any(line.split()[:3] == ["node0", "-", "8"] for line in buffer.getvalue().splitlines())


def test_a_lost_gpu_on_one_of_several_nodes(tmp_path: Path) -> None:
    samples = {"gpus": [{"lost": "GPU is lost"}]}
    text = shown(Cluster(tmp_path, lan(2), more_facts=gpu_facts(), more_samples=samples))
    assert "  GPU node0:0, node1:0: lost (GPU is lost)\n" in text


def test_many_nodes_are_cut(tmp_path: Path) -> None:
    text = shown(Cluster(tmp_path, lan(10), steps=20))
    assert "8 of 10 links are shown" in text
    assert "8 of 10 nodes are shown" in text
    assert "node9" not in text.partition("Traffic")[2].partition("Checked")[0]


def test_a_job_that_is_over_at_once_shows_nothing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, lan(1), steps=2)
    cluster.build()
    path = tmp_path / "node-node0.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:5]) + "\n")
    buffer = io.StringIO()
    render(analyse_run(tmp_path), Console(file=buffer, width=80), detail=Detail.ALL)
    assert "Hardware" not in buffer.getvalue()
    assert "Traffic" not in buffer.getvalue()
