"""Multi-node jobs: one report with shared storage, one per node without it, and merging."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import BIN, environment
from tests.helpers.paths import JOBS
from tests.lab.host import Host
from tests.lab.lab import Ended, Lab, make_lab

pytestmark = [pytest.mark.slow, pytest.mark.needs("lab")]

JOB = JOBS / "on_nodes.py"
WATCH = [BIN / "ddpcheck", "run"]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with make_lab(2, tmp_path) as hosts:
        yield hosts


def report_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return content


def codes(report: Mapping[str, Any]) -> list[str]:
    return [finding["code"] for finding in report["findings"]]


def output(ended: list[Ended]) -> str:
    return "\n".join(map(str, ended))


def test_nodes_with_shared_storage_write_one_run_and_one_report(lab: Lab, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", "job7", "--rdzv-endpoint", f"{lab[0].name}:29400"]
    launch = [BIN / "torchrun", "--nnodes", 2, "--nproc-per-node", 2, *rendezvous, JOB, "--clock-ahead", 2.5]

    ended = lab.run_all(
        lambda number, host: [*WATCH, "--out", shared, "--", *launch],
        env=lambda number, host: environment(),
    )

    assert [one.status for one in ended] == [0, 0], output(ended)
    report = report_of(shared)
    assert (report["verdict"], report["world_size"], codes(report)) == ("ok", 4, []), output(ended)
    assert report["run"]["id"] == "job7"
    # torchrun numbers nodes in the order of their arrival.
    first, second = report["hosts"]
    assert {first["host"], second["host"]} == {"node0", "node1"}
    assert sorted(first["ranks"] + second["ranks"]) == [0, 1, 2, 3]
    ahead = 2.5 if second["host"] == "node1" else -2.5
    assert second["moments"] == 9  # steps 3 to 8, then every fourth of 20
    assert second["uncertainty"] < 1.0
    assert second["offset"] == pytest.approx(ahead, abs=0.02 + 3 * second["uncertainty"])
    # Only the node of rank 0 prints the report.
    assert {one.host: "4 ranks" in one.stderr for one in ended} == {
        first["host"]: True,
        second["host"]: False,
    }, output(ended)


def test_nodes_without_shared_storage_each_report_the_divergence(lab: Lab, tmp_path: Path) -> None:
    def launch(number: int, host: Host) -> list[object]:
        static = ["--nnodes", 2, "--node-rank", number, "--master-addr", lab[0].name, "--master-port", 29401]
        return [*WATCH, "--out", "run", "--", BIN / "torchrun", *static, JOB, "--diverge-at", 5]

    ended = lab.run_all(launch, env=lambda number, host: environment())

    assert [one.status for one in ended] == [10, 10], output(ended)
    for host, other in ((lab[0], lab[1]), (lab[1], lab[0])):
        report = report_of(host.folder / "run")
        [finding] = report["findings"]
        assert (finding["code"], finding["step"], finding["stage"]) == ("DDP201", 5, "params")
        assert finding["ranks"] == [0, 1]
        assert finding["evidence"]["hosts"] == {"0": "node0", "1": "node1"}
        assert [row["host"] for row in report["hosts"] if not row["here"]] == [other.name]

    joined = subprocess.run(
        [
            BIN / "ddpcheck",
            "merge",
            lab[1].folder / "run",
            lab[0].folder / "run",
            "--out",
            tmp_path / "whole",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
    )

    assert joined.returncode == 0, joined.stderr
    whole = report_of(tmp_path / "whole")
    [finding] = whole["findings"]
    assert (finding["code"], finding["step"]) == ("DDP206", 5)
    assert "lr" in finding["cause"]
    assert [row["here"] for row in whole["hosts"]] == [True, True]
    assert abs(whole["hosts"][1]["offset"]) < 0.02 + 3 * whole["hosts"][1]["uncertainty"]
    assert "DDP206" in joined.stdout


def test_ranks_of_a_scheduler_find_each_other_by_its_job_id(lab: Lab, tmp_path: Path) -> None:
    shared = tmp_path / "shared"

    def slurm(number: int, host: Host) -> dict[str, str]:
        of_step = {"SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
        own = {"SLURM_PROCID": str(number), "SLURM_LOCALID": "0"}
        return environment(**of_step, **own, MASTER_ADDR=lab[0].name, MASTER_PORT="29402")

    ended = lab.run_all(
        lambda number, host: [*WATCH, "--out", shared, "--", BIN / "python", JOB, "--diverge-at", 5],
        env=slurm,
    )

    # Both exit with the status of the one report.
    assert [one.status for one in ended] == [10, 10], output(ended)
    report = report_of(shared)
    assert codes(report) == ["DDP206"], output(ended)
    assert report["findings"][0]["step"] == 5
    assert report["run"]["id"] == "4242.0"
    assert [row["status"] for row in report["attempts"][0]["ranks"]] == ["finished", "finished"]
