"""DDP402: a straggler, and whether its GPU is throttled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.records.kinds.rank import DeviceRecord
from ddpcheck.records.kinds.timing import ClockRecord
from ddpcheck.records.registry import Record
from tests.helpers.cluster import Cluster, Interface

STEPS = 60
HEAT, POWER, IDLE = 0x40, 0x4, 0x1


def clocks(part: str, late: bool, faults: int = 0, kernel: int = 0) -> list[Record]:
    """A step of 80 ms, in which the straggler spends 20 ms more in one part."""
    took = {"data": 5_000, "forward": 20_000, "backward": 20_000, "optimizer": 5_000}
    took[part] += 20_000 if late else 0
    columns: dict[str, Any] = {name: [value] for name, value in took.items()}
    wait = 80_000 - sum(took.values()) - 2_000
    return [
        ClockRecord(
            step,
            total=[80_000],
            wait=[wait],
            watching=[0],
            queued=[0],
            faults=[faults],
            kernel=[kernel],
            **columns,
        )
        for step in range(STEPS)
    ]


def gpu(rank: int, throttled: int = IDLE, clock: int | None = 1410) -> dict[str, Any]:
    sample = {"throttled": throttled, "busy": 90, "processes": {str(100 + rank): 1 << 30}}
    return {"gpus": [sample if clock is None else {**sample, "clock": clock}]}


def finding(
    folder: Path,
    gpus: Mapping[int, Mapping[str, Any]],
    part: str = "forward",
    faulted: tuple[int, int] = (0, 0),
    severity: str = "warning",
) -> Finding:
    """Rank 1 of three, one on each node, is late."""
    cluster = Cluster(
        folder,
        [[Interface("eth0")] for _ in range(3)],
        steps=STEPS,
        more_facts={"nvml": {"driver": "570", "gpus": [{"index": 5, "name": "H"}]}},
        own_samples=gpus,
        more_records={
            rank: clocks(part, rank == 1, *(faulted if rank == 1 else (0, 0))) for rank in range(3)
        },
    )
    cluster.build()
    [results] = [each for each in analyse_run(folder).findings if each.code == "DDP402"]
    assert (results.ranks, results.stage, results.severity.value) == ((1,), part, severity)
    return results


@pytest.mark.parametrize("part", ["forward", "backward", "optimizer"])
def test_the_gpu_of_the_straggler_is_throttled(tmp_path: Path, part: str) -> None:
    results = finding(tmp_path, {0: gpu(0), 1: gpu(1, HEAT, 700), 2: gpu(2, IDLE, 1390)}, part)
    assert results.cause == (
        "throttling: the clocks of its GPU (node1:5) were reduced (hardware thermal slowdown in 100 % of the samples; "
        "it ran at 700 MHz, the others at 1400 MHz)"
    )
    assert results.evidence["throttled"] == {
        "gpus": ["node1:5"],
        "reasons": {"hardware thermal slowdown": 1.0},
        "mhz": 700,
        "others_mhz": 1400,
    }
    assert "cooling" in results.fix


def uuid_of(rank: int) -> str:
    return f"0{rank}11aabb-0000-1111-2222-333344445555"


def test_the_gpu_of_a_rank_in_a_container(tmp_path: Path) -> None:
    """NVML gives the process ids of the host there: the rank's UUID says which GPU it uses. Its slice has one too."""
    gpus = {
        rank: gpu(50 + rank, HEAT if rank == 1 else IDLE, 700 if rank == 1 else 1400) for rank in range(3)
    }
    for rank in range(3):
        gpus[rank]["gpus"] = [
            {"busy": 1, "clock": 1980},
            {**gpus[rank]["gpus"][0], "mig": [5 << 30, 7 << 30]},
        ]
    slices = [
        {"uuid": "MIG-00", "memory": 1},
        *({"uuid": f"MIG-{uuid_of(rank)}", "memory": 1} for rank in range(3)),
    ]
    cluster = Cluster(
        tmp_path,
        [[Interface("eth0")] for _ in range(3)],
        steps=STEPS,
        more_facts={
            "nvml": {"gpus": [{"index": 4, "uuid": "GPU-77"}, {"index": 5, "uuid": "GPU-78", "mig": slices}]}
        },
        own_samples=gpus,
        more_records={
            rank: [DeviceRecord(0, "cuda:0", uuid=uuid_of(rank)), *clocks("forward", rank == 1)]
            for rank in range(3)
        },
    )
    cluster.build()
    report = analyse_run(tmp_path)
    [found] = [each for each in report.findings if each.code == "DDP402"]
    assert found.evidence["throttled"]["gpus"] == ["node1:5"]
    node = report.hardware["nodes"][0]
    assert [row["ranks"] for row in node["gpus"]] == [[], [0]]
    assert [row["ranks"] for row in node["gpus"][1]["mig"]] == [[], [0], [], []]
    assert (node["ranks"]["0"]["gpus"], node["ranks"]["0"]["gpus_by"]) == ([5], "uuid")
    assert node["ranks"]["0"]["gpu_memory"] == 7 << 30
    json_report = json.loads(json.dumps(report.hardware))
    assert json_report == report.hardware


def test_a_driver_without_clocks(tmp_path: Path) -> None:
    gpus = {0: gpu(0, clock=None), 1: gpu(1, POWER, clock=None), 2: gpu(2, clock=None)}
    assert finding(tmp_path, gpus).cause == (
        "throttling: the clocks of its GPU (node1:5) were reduced (power cap in 100 % of the samples)"
    )


@pytest.mark.parametrize(
    "gpus",
    [
        # All alike, as busy GPUs under a power cap.
        {rank: gpu(rank, POWER) for rank in range(3)},
        # Another GPU, which no rank waits for.
        {0: gpu(0, HEAT, 700), 1: gpu(1), 2: gpu(2)},
        # Throttled, but not slower.
        {0: gpu(0), 1: gpu(1, POWER, 1400), 2: gpu(2)},
        # The GPU of a rank is unknown.
        {0: gpu(7), 1: gpu(1, HEAT, 700), 2: gpu(2)},
        {},
    ],
    ids=["all alike", "another", "no slower", "not known", "no GPUs"],
)
def test_throttling_that_explains_nothing(tmp_path: Path, gpus: dict[int, Any]) -> None:
    results = finding(tmp_path, gpus)
    assert results.cause == "the forward takes longer there: more work, or a slower or busier device"
    assert "throttled" not in results.evidence


def test_late_data_for_other_reasons(tmp_path: Path) -> None:
    results = finding(tmp_path, {0: gpu(0), 1: gpu(1, HEAT, 700), 2: gpu(2)}, "data")
    assert results.cause == "the data loader takes longer there to return a batch"


def test_memory_that_the_c_library_returns(tmp_path: Path) -> None:
    results = finding(tmp_path, {}, "optimizer", faulted=(12_345, 18_000), severity="note")
    assert results.cause == (
        "page faults: it allocates and frees 12,345 more pages per step than the other ranks, which costs 18.0 ms more "
        "time in the kernel"
    )
    assert (results.evidence["page_faults_more"], results.evidence["kernel_ms_more"]) == (12_345, 18.0)
    assert "MALLOC_TRIM_THRESHOLD_=8589934592" in results.fix


def test_throttling_comes_before_page_faults(tmp_path: Path) -> None:
    gpus = {0: gpu(0), 1: gpu(1, HEAT, 700), 2: gpu(2)}
    assert finding(tmp_path, gpus, faulted=(12_345, 18_000)).cause.startswith("throttling: ")


def test_kernel_time_without_page_faults(tmp_path: Path) -> None:
    assert finding(tmp_path, {}, faulted=(100, 18_000)).cause.startswith("the forward takes longer there")
