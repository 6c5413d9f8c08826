"""Hardware sampling under `ddpcheck run`: GPUs by a library with NVML's ABI, and traffic between hosts of a lab."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import broken_sampler, nvml
from tests.helpers.commands import BIN, environment
from tests.helpers.fork_server import prefix, prepared
from tests.helpers.paths import JOBS
from tests.helpers.watched_run import TIMEOUT_SECONDS, RunWatched, records_in, run_to_end
from tests.lab.host import Host
from tests.lab.lab import Lab, make_lab

PYTHON = BIN / "python"
# 1 MiB of gradients: other traffic is negligible.
WIDTH = 512
GRADIENT_BYTES = 4 * WIDTH * WIDTH
# Half a step at either end, TCP headers, and traffic of the store.
TOLERANCE = 0.1


@pytest.mark.needs("gcc")
def test_gpu_counters_that_wrap_and_a_gpu_that_is_lost(ddpcheck: RunWatched, tmp_path: Path) -> None:
    library = nvml.compiled_into(tmp_path)
    script = f"""
        devices 3
        links 2
        nvlink 1000 1000000
        pcie {2**32 - 1000000} 10000000 32
        throttle 64
        ecc 0 2
        process 0 4242 123456
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
    healthy, lost, mig = node["gpus"]
    assert node["driver"] == "570.00.00"
    assert node["topology"][0][1] == "NV2"
    seconds = node["seconds"]
    assert healthy["nvlink"]["sent"] == pytest.approx(2 * 1024e6 * seconds, rel=0.2)
    assert healthy["pcie"]["sent"] == pytest.approx(10e6 * seconds, rel=0.2)
    assert healthy["throttled"] == {"hardware thermal slowdown": 1.0}
    assert "power" in healthy["unsupported"]
    assert healthy["power_watts"] is None
    assert (lost["lost"], healthy["lost"], mig["lost"]) == ("GPU is lost", "", "")
    assert lost["pcie"]["sent"] < 0.8 * healthy["pcie"]["sent"]
    assert [(each["uuid"], each["most"]) for each in mig["mig"]] == [
        ("MIG-3001", 3 << 30),
        ("MIG-3002", 3 << 30),
    ]
    # Both links in both directions. Counters of links and of the device are read one after the other.
    assert [link["link"] for link in healthy["nvlink_by_link"]] == [0, 1]
    for way in ("sent", "received"):
        by_link = [link[way] for link in healthy["nvlink_by_link"]]
        assert sum(by_link) == healthy["nvlink"][way]
        assert by_link == pytest.approx([1024e6 * seconds] * 2, rel=0.2)
    assert healthy["processes"] == [{"pid": 4242, "rank": None, "most": 123456}]
    assert healthy["ecc"]["uncorrected"] == pytest.approx(2 * seconds, abs=1.5)
    assert healthy["pcie_link"]["most"] == {"generation": 5, "width": 16}
    assert healthy["pcie_link"]["now"] == {"generation": 3, "width": 8}
    # Remarks about the width, the generation, and memory errors.
    assert any("x8" in remark and "x16" in remark for remark in healthy["remarks"])
    assert any("3" in remark and "5" in remark for remark in healthy["remarks"])
    assert len(healthy["remarks"]) >= 3
    refused = (tmp_path / "refused").read_text()
    assert refused.count("nvmlDeviceGetPowerUsage") == 3  # once per device
    assert refused.count(" 15\n") == 1
    assert "DDP605" not in watched.codes()


@pytest.mark.slow
@pytest.mark.needs("gcc")
def test_a_straggler_whose_gpu_is_throttled(tmp_path: Path) -> None:
    """The library reads the ranks' process ids from a file; the job itself runs on the CPU."""
    library, processes, folder = nvml.compiled_into(tmp_path), tmp_path / "processes", tmp_path / "run"
    script = f"devices 2\nthrottle_gpu 1 64 705\nprocesses {processes}\n"
    job = prepared(JOBS / "clock_cases.py", "--cases", "much_slower_forward", "--steps", 32)
    watch = [BIN / "ddpcheck", "run", "--out", folder, "--sample-hz", 10, "--", *job]
    env = environment(**nvml.environment(library, script))
    process = subprocess.Popen(
        [*map(str, (*prefix(watch), *watch))],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        _write_processes(process, folder, processes)
        output = process.communicate(timeout=TIMEOUT_SECONDS)[0]
    finally:
        process.terminate()
    assert process.returncode == 0, output
    report = json.loads((folder / "report.json").read_text())
    [finding] = [each for each in report["findings"] if each["code"] == "DDP402"]
    assert (finding["ranks"], finding["stage"]) == ([1], "forward"), output
    assert finding["evidence"]["throttled"]["reasons"] == {"hardware thermal slowdown": 1.0}
    assert (finding["evidence"]["throttled"]["mhz"], finding["evidence"]["throttled"]["others_mhz"]) == (
        705,
        1410,
    )
    [node] = report["hardware"]["nodes"]
    assert {rank: (row["gpus"], row["gpu_memory"]) for rank, row in node["ranks"].items()} == {
        "0": ([0], 1 << 20),
        "1": ([1], 2 << 20),
    }
    assert [[each["rank"] for each in gpu["processes"]] for gpu in node["gpus"]] == [[0], [1]]


def _write_processes(process: subprocess.Popen[str], folder: Path, out: Path) -> None:
    """Rank 0 on GPU 0 and rank 1 on GPU 1, as soon as both have written their headers."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        files = sorted(folder.glob("rank-*.jsonl"))
        headers = [file.read_bytes().partition(b"\n") for file in files]
        if len([end for _, end, _ in headers if end]) == 2:
            pids = [json.loads(header)["pid"] for header, _, _ in headers]
            unfinished = out.with_suffix(".unfinished")
            unfinished.write_text(
                "".join(f"{rank} {pid} {(rank + 1) << 20}\n" for rank, pid in enumerate(pids))
            )
            unfinished.rename(out)
            return
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.needs("gcc")
def test_a_broken_sampler_does_not_affect_the_job(tmp_path: Path) -> None:
    """Every source raises or hangs: the weights are those of the job without ddpcheck."""
    library, folder = nvml.compiled_into(tmp_path), tmp_path / "run"
    job = prepared(JOBS / "forked.py", "--steps", 30, "--pause", 0.1)
    breaking = [PYTHON, broken_sampler.__file__, "run", "--out", folder]
    broken = [*breaking, "--sample-hz", 5, "--", *job]
    hangs = nvml.environment(library, "devices 2\nhang nvmlDeviceGetPowerUsage 2.0 600\n")
    alone = subprocess.Popen(
        [*map(str, (*prefix(job), *job))], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        done = run_to_end(broken, tmp_path, hangs, leaves=folder)
        weights = alone.communicate(timeout=TIMEOUT_SECONDS)[0]
    finally:
        alone.kill()
    assert (done.status, done.stdout) == (0, weights), str(done)
    assert "Traceback" not in done.stderr
    report = json.loads((folder / "report.json").read_text())
    assert report["verdict"] == "ok", report["findings"]
    results = {each["evidence"]["entry"]: each for each in report["findings"]}
    assert set(results) == {f"sampler.{source}" for source in (*broken_sampler.SOURCES, "gpus")}
    assert {each["code"] for each in report["findings"]} == {"DDP605"}
    assert "NVML" in results["sampler.gpus"]["evidence"]["error"]
    # Samples from before the failures are kept.
    [node] = report["hardware"]["nodes"]
    assert [gpu["power_watts"] for gpu in node["gpus"]] == [300.0, 300.0]
    assert node["cpu"]["mean"] >= 0


def test_a_log_that_cannot_be_written(ddpcheck: RunWatched, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / f"node-{os.uname().nodename}.jsonl").mkdir(parents=True)
    watched = ddpcheck("sleep", 1, options=["--sample-hz", 5, "--fail-on", "never"])
    assert watched.status == 0, str(watched)
    assert watched.codes("note") == ["DDP605"]
    assert watched.report["hardware"] == {}


def test_sampling_can_be_switched_off(ddpcheck: RunWatched) -> None:
    watched = ddpcheck("true", options=["--sample-hz", 0, "--fail-on", "never"])
    [log] = watched.folder.glob("node-*.jsonl")
    assert {"hardware", "sample", "sampled"}.isdisjoint(record["kind"] for record in records_in(log))
    assert (watched.report["hardware"], watched.report["traffic"]) == ({}, {})


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with make_lab(2, tmp_path_factory.mktemp("hosts"), cards=(1000, 25_000)) as hosts:
        yield hosts


def run_on(lab: Lab, folder: Path, interface: str, port: int) -> dict[str, Any]:
    """One job on all hosts, two ranks each, in one run folder; returns its report."""
    weights = folder.with_suffix(".weights")
    options = ["--nnodes", 2, "--per-node", 2, "--width", WIDTH, "--steps", 60, "--checkpoint", weights]
    job = prepared(JOBS / "nodes.py", *options)

    def launch(number: int, host: Host) -> list[object]:
        return [BIN / "ddpcheck", "run", "--out", folder, "--", *job, "--node-rank", number]

    def env(number: int, host: Host) -> dict[str, str]:
        return environment(MASTER_ADDR="node0", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME=interface)

    ended = lab.run_all(launch, env=env, seconds=TIMEOUT_SECONDS)
    assert [one.status for one in ended] == [0, 0], "\n".join(map(str, ended))
    return dict(json.loads((folder / "report.json").read_text()))


@pytest.mark.slow
@pytest.mark.needs("lab")
@pytest.mark.parametrize(("interface", "codes"), [("net0", ["DDP405"]), ("net1", [])])
def test_traffic_between_hosts(lab: Lab, tmp_path: Path, interface: str, codes: list[str]) -> None:
    port = 29711 if interface == "net0" else 29712
    report = run_on(lab, tmp_path / interface, interface, port)
    assert report["world_size"] == 4
    warnings = [finding for finding in report["findings"] if finding["severity"] != "note"]
    assert [finding["code"] for finding in warnings] == codes
    # Each of four ranks sends 2 * 3/4 of the gradients. The ring leaves each node once and stays inside it once.
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
    check_startup(report["startup"])
    if warnings:
        assert "GLOO_SOCKET_IFNAME=net1" in warnings[0]["fix"]
        assert "net0" in warnings[0]["cause"]


def check_startup(startup: dict[str, Any]) -> None:
    """Every rank of both hosts read the same file: bytes by rank, by node and in total."""
    assert startup["scenario"] == "every rank reads"
    assert [(row["rank"], row["host"]) for row in startup["ranks"]] == [
        (0, "node0"),
        (1, "node0"),
        (2, "node1"),
        (3, "node1"),
    ]
    [size] = {row["loaded_bytes"] for row in startup["ranks"]}
    assert GRADIENT_BYTES <= size < 1.01 * GRADIENT_BYTES
    assert [(node["host"], node["ranks"]) for node in startup["nodes"]] == [
        ("node0", [0, 1]),
        ("node1", [2, 3]),
    ]
    assert [(node["loaded_bytes"], node["repeated_bytes"]) for node in startup["nodes"]] == [
        (2 * size, size)
    ] * 2
    assert (startup["loaded_bytes"], startup["repeated_bytes"]) == (4 * size, 3 * size)
    assert all(word in startup["summary"] for word in ("4.2 MB", "2.1 MB", "node0"))
