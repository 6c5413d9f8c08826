"""Sampling under the real `ddpcheck run`: GPUs by NVML's ABI, and traffic between hosts with networks of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import BIN, JOBS, MOST_SECONDS, RunWatched, environment, records_in

from tests.lab.host import Host
from tests.lab.lab import Lab, make_lab, missing
from tests.support import nvml

PYTHON = BIN / "python"
# Large enough that what else goes over the network does not count: 1 MiB of gradients.
WIDTH = 512
GRADIENT_BYTES = 4 * WIDTH * WIDTH
# Half a step at either end, TCP's own bytes, and the store's.
TOLERANCE = 0.1


def test_gpus_that_grow_wrap_and_get_lost(ddpcheck: RunWatched, tmp_path: Path) -> None:
    library = nvml.compiled_into(tmp_path)
    script = f"""
        devices 3
        links 2
        nvlink 1000 1000000
        pcie {2**32 - 1000000} 10000000 32
        throttle 64
        fail nvmlDeviceGetPowerUsage 3
        mig 2 2
        lost 1 1.5
        log {tmp_path}/refused
    """
    lines = "\n".join(line.strip() for line in script.splitlines())
    options = ["--sample-hz", 5, "--fail-on", "never"]
    watched = ddpcheck("sleep", 3, options=options, **nvml.environment(library, lines))
    assert watched.status == 0, str(watched)
    [node] = watched.report["hardware"]["nodes"]
    sound, lost, cut = node["gpus"]
    assert node["driver"] == "570.00.00"
    assert node["topology"][0][1] == "NV2"
    seconds = node["seconds"]
    assert sound["nvlink"]["sent"] == pytest.approx(2 * 1024e6 * seconds, rel=0.2)
    assert sound["pcie"]["sent"] == pytest.approx(10e6 * seconds, rel=0.2)
    assert sound["throttled"] == {"hardware thermal slowdown": 1.0}
    assert "power" in sound["unsupported"]
    assert sound["power_watts"] is None
    assert (lost["lost"], sound["lost"], cut["lost"]) == ("GPU is lost", "", "")
    assert lost["pcie"]["sent"] < 0.8 * sound["pcie"]["sent"]
    assert len(cut["mig"]) == 2
    refused = (tmp_path / "refused").read_text()
    assert refused.count("nvmlDeviceGetPowerUsage") == 3  # once a device
    assert refused.count(" 15\n") == 1
    assert "GPU 1: lost (GPU is lost)" in watched.stderr
    assert "DDP605" not in watched.codes()


def test_sampling_can_be_switched_off(ddpcheck: RunWatched) -> None:
    watched = ddpcheck("true", options=["--sample-hz", 0, "--fail-on", "never"])
    [log] = watched.folder.glob("node-*.jsonl")
    assert {"hardware", "sample", "sampled"}.isdisjoint(record["kind"] for record in records_in(log))
    assert (watched.report["hardware"], watched.report["traffic"]) == ({}, {})


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if missing():
        pytest.skip(missing())
    with make_lab(2, tmp_path_factory.mktemp("hosts"), cards=(1000, 25_000)) as hosts:
        yield hosts


def run_on(lab: Lab, folder: Path, interface: str, port: int) -> dict[str, Any]:
    """One job on all hosts, two ranks each, in one run folder; the report of the last to leave."""
    job = [PYTHON, JOBS / "nodes.py", "--nnodes", 2, "--per-node", 2, "--width", WIDTH, "--steps", 60]

    def launch(number: int, host: Host) -> list[object]:
        return [BIN / "ddpcheck", "run", "--out", folder, "--", *job, "--node-rank", number]

    def told(number: int, host: Host) -> dict[str, str]:
        return environment(MASTER_ADDR="node0", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME=interface)

    ended = lab.run_all(launch, env=told, seconds=MOST_SECONDS)
    assert [one.status for one in ended] == [0, 0], "\n".join(map(str, ended))
    return dict(json.loads((folder / "report.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize(("interface", "codes"), [("net0", ["DDP405"]), ("net1", [])])
def test_traffic_between_hosts(lab: Lab, tmp_path: Path, interface: str, codes: list[str]) -> None:
    port = 29711 if interface == "net0" else 29712
    report = run_on(lab, tmp_path / interface, interface, port)
    assert report["world_size"] == 4
    warnings = [finding for finding in report["findings"] if finding["severity"] != "note"]
    assert [finding["code"] for finding in warnings] == codes
    # Each of four ranks sends 2 * 3/4 of the gradients; the ring leaves a node once and stays inside once.
    share = 1.5 * GRADIENT_BYTES
    assert report["traffic"]["expected"] == 4 * share
    assert [(node["host"], node["ranks"]) for node in report["traffic"]["nodes"]] == [
        ("node0", [0, 1]),
        ("node1", [2, 3]),
    ]
    for node in report["traffic"]["nodes"]:
        for kind in ("network", "loopback"):
            moved = node["classes"][kind]
            assert moved["expected"] == share
            assert moved["sent"] == pytest.approx(share, rel=TOLERANCE)
            assert moved["received"] == pytest.approx(share, rel=TOLERANCE)
        [taken] = [link for link in node["links"] if link["class"] == "network" and link["sent"] > 1000]
        assert taken["name"] == interface
    if warnings:
        assert "GLOO_SOCKET_IFNAME=net1" in warnings[0]["fix"]
        assert warnings[0]["cause"] == "GLOO_SOCKET_IFNAME names it (net0)"
