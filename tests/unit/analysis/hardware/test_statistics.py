"""Statistics of a node's samples, with bounded memory."""

from __future__ import annotations

from ddpcheck.analysis.hardware.samples import MOST_POINTS, NodeSamples
from ddpcheck.analysis.hardware.statistics import GpuSample, NodeSample, sample_from
from ddpcheck.records.node_kinds import SampleRecord


def node_sample(time: float, cpu: float = 10.0, **gpu: int) -> NodeSample:
    moved = {"eth0": (round(100 * time), round(200 * time), 0, 0, 0, 0)}
    ranks = {"4": (77, round(time), 1, 2)}
    gpus = (GpuSample(processes={77: 5}, **gpu), GpuSample(lost="gone") if time > 500 else GpuSample(busy=1))  # type: ignore[arg-type]
    return NodeSample(time, cpu, 1000, moved, {}, ranks, gpus)


def test_a_peak_of_one_sample_in_a_thousand_is_kept() -> None:
    node = NodeSamples("h")
    for time in range(1, 1001):
        hot = time == 333
        node.add(
            node_sample(
                float(time), 99.0 if hot else 10.0, temperature=90 if hot else 50, clock=300 if hot else 1400
            ),
            (100.0, 900.0),
        )
    assert len(node.series) <= MOST_POINTS
    assert node.count == 1000
    statistics = node.statistics
    assert (statistics.cpu.most, statistics.gpus[0].temperature, statistics.gpus[0].lowest_clock) == (
        99.0,
        90,
        300,
    )
    assert statistics.rates == {"eth0": (100, 200)}
    rank_row = {"most_memory": 1000, "gpu_memory": 5, "storage_read": 1, "storage_written": 2, "gpus": {0}}
    assert (statistics.ranks, statistics.pids, statistics.gpus[0].processes) == (
        {"4": rank_row},
        {77: "4"},
        {77: 5},
    )
    assert (statistics.gpus[1].lost, statistics.gpus[1].count) == ("gone", 500)
    assert node.opening is not None
    assert node.closing is not None
    assert (node.opening.time, node.closing.time) == (100.0, 900.0)


def test_statistics_during_the_steps_only() -> None:
    node = NodeSamples("h")
    for time in range(1, 11):
        node.add(node_sample(float(time), throttled=0x40 if time < 4 else 0, clock=100 * time), (4.0, 9.0))
    assert (node.stepping[0].count, node.stepping[0].throttling()) == (6, {})
    assert node.stepping[0].clock.row() == {"mean": 650.0, "most": 900}
    assert node.statistics.gpus[0].throttling() == {"hardware thermal slowdown": 0.3}


def test_the_generation_of_pcie_counts_while_the_gpu_works() -> None:
    node = NodeSamples("h")
    for busy, generation in ((0, 1), (80, 3), (90, 4), (0, 5)):
        gpu = GpuSample(busy=busy, pcie_link=(generation, 16))
        node.add(NodeSample(1.0, gpus=(gpu,)), None)
    assert (node.statistics.gpus[0].generation, node.statistics.gpus[0].at_work) == (4, 2)


def test_slices_at_their_most() -> None:
    node = NodeSamples("h")
    for used in ((), (5, 1), (3, 2)):
        node.add(NodeSample(1.0, gpus=(GpuSample(mig=used),)), None)
    assert node.statistics.gpus[0].mig == [5, 2]


def test_throttling_is_a_share_of_samples() -> None:
    node = NodeSamples("h")
    for time in range(1, 5):
        node.add(node_sample(float(time), throttled=0x40 if time == 1 else 0x1), None)
    assert node.statistics.gpus[0].throttling() == {"hardware thermal slowdown": 0.25}


def test_counters_of_the_wrong_width_are_left_out() -> None:
    record = SampleRecord(1.0, interfaces={"lo": [1, 2], "eth0": [1, 2, 3, 4, 5, 6]})
    assert sample_from(record) == NodeSample(1.0, interfaces={"eth0": (1, 2, 3, 4, 5, 6)})
