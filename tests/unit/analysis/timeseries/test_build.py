"""Series over the steps: aligned and downsampled, by rank."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ddpcheck.analysis.network.connections import NodeLinks
from ddpcheck.analysis.network.model import NodeLink, SlowLink
from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.analysis.timeseries.build import MOST_NAMED, MOST_RANKS
from ddpcheck.analysis.timeseries.collector import MOST_POINTS as MOST_DIFFERING
from ddpcheck.analysis.timeseries.collector import MOST_STEPS, DifferingSeries, LossSeries, differing
from ddpcheck.analysis.timeseries.model import NamedSeries, RunTimeSeries, SeriesKind
from ddpcheck.analysis.timeseries.nodes import link_matrices
from ddpcheck.analysis.timeseries.series import MAX_REPORT_POINTS, named_series
from ddpcheck.records.kinds.digests import DigestRecord
from ddpcheck.records.kinds.modules import LossRecord
from tests.helpers.cluster import BYTES, START, Cluster, Interface
from tests.helpers.run_builder import NAMES, RunBuilder
from tests.helpers.tensorboard_run import DIVERGENCE_STEP, LOCAL, STEPS, WAITS, build


def course(path: Path) -> RunTimeSeries:
    series = analyse_run(path, course=True).course
    assert series is not None
    return series


def only(lines: tuple[NamedSeries, ...], figure: SeriesKind, of: str = "") -> dict[int, float]:
    [series] = [one for one in lines if one.figure is figure and one.of == of]
    return dict(zip(series.steps, series.values, strict=True))


@pytest.fixture(scope="module")
def all_series(tmp_path_factory: pytest.TempPathFactory) -> RunTimeSeries:
    return course(build(tmp_path_factory.mktemp("run")))


def test_it_is_built_only_on_request(tmp_path: Path) -> None:
    assert RunBuilder(tmp_path, 2).wrap().train(3).end().report().course is None


def test_agreement(all_series: RunTimeSeries) -> None:
    agree = {step: float(step < DIVERGENCE_STEP) for step in range(STEPS)}
    assert only(all_series.job, SeriesKind.AGREEMENT) == agree
    assert only(all_series.job, SeriesKind.DIFFERING) == {
        step: 2 * (1 - there) for step, there in agree.items()
    }
    assert only(all_series.ranks[0], SeriesKind.AGREEMENT) == dict.fromkeys(range(STEPS), 1.0)
    assert only(all_series.ranks[2], SeriesKind.AGREEMENT) == agree


def test_gradients(all_series: RunTimeSeries) -> None:
    # Norms of sketches are accurate to 20 %.
    for rank, own in LOCAL.items():
        norms = only(all_series.ranks[rank], SeriesKind.NORM_BEFORE)
        assert norms == pytest.approx(dict.fromkeys(range(STEPS), own[0]), rel=0.2)
    assert only(all_series.job, SeriesKind.NORM_AFTER) == pytest.approx(
        dict.fromkeys(range(STEPS), 2.0), rel=0.2
    )
    assert set(only(all_series.job, SeriesKind.OFF_MEAN)) == set(range(STEPS))
    assert max(only(all_series.job, SeriesKind.OFF_MEAN).values()) < 1


def test_loss_of_each_rank_and_their_mean(all_series: RunTimeSeries) -> None:
    assert only(all_series.ranks[1], SeriesKind.LOSS)[4] == 4.0
    mean = only(all_series.job, SeriesKind.LOSS)
    assert math.isnan(mean.pop(2))
    assert mean == {0: 1.0, 1: 0.5, 3: 1.0, 4: 2.0, 5: 3.0}


def test_step_times_and_waits(all_series: RunTimeSeries) -> None:
    assert only(all_series.ranks[0], SeriesKind.STEP) == dict.fromkeys(range(1, STEPS), 10_000.0)
    assert only(all_series.ranks[0], SeriesKind.OTHER)[1] == 10_000 - 1000 - 2000 - 3000 - 500 - WAITS[0][0]
    shortest = [min(waits) for waits in zip(*WAITS.values(), strict=True)]
    assert only(all_series.job, SeriesKind.EXPOSED) == dict(enumerate(map(float, shortest), 1))
    assert only(all_series.ranks[2], SeriesKind.FOR_OTHERS) == {1: 20.0, 2: 0.0, 3: 30.0, 4: 25.0, 5: 0.0}


def test_memory(all_series: RunTimeSeries) -> None:
    # The last value holds to the end.
    assert only(all_series.ranks[2], SeriesKind.MEMORY) == dict.fromkeys((0, 1, 2, STEPS - 1), float(3 << 20))
    assert only(all_series.ranks[2], SeriesKind.MEMORY_HIGH) == dict.fromkeys(
        (0, 1, 2, STEPS - 1), float(10 << 20)
    )


def test_histograms_of_saved_gradients(all_series: RunTimeSeries) -> None:
    [reduced] = [one for one in all_series.histograms if one.reduced and one.step == 0]
    assert (reduced.rank, reduced.parameter, sum(reduced.counts)) == (None, "body.weight", 4)
    assert reduced.edges[0] < 2.0 < reduced.edges[-1]
    # Where they are not the same on all ranks, each has its own.
    diverged = [one for one in all_series.histograms if one.reduced and one.step == 4]
    assert [(one.rank, round(one.edges[0], 3)) for one in diverged] == [(0, 2.0), (1, 3.0), (2, 4.0)]
    local = [one for one in all_series.histograms if not one.reduced and one.rank == 1]
    assert [one.step for one in local] == [0, 4]
    assert (local[0].edges[0], local[0].edges[-1], local[0].counts) == (1.0, 60.0, (2,) * 30)


def test_links(all_series: RunTimeSeries) -> None:
    [matrix] = all_series.links
    assert matrix.names == ("node0", "node1", "node2", "node3")
    assert matrix.rates[0] == (None, 1e8, 2e7, 1e8)
    assert matrix.usual == 6e7


def test_links_of_the_jobs_own_traffic(tmp_path: Path) -> None:
    def link(source: str, target: str, megabytes: int) -> NodeLink:
        return NodeLink(source, target, megabytes * 10**7, 10.0, 20.0)

    links = (link("a", "b", 100), link("a", "b", 20), link("b", "c", 100), link("c", "a", 90))
    ranks: dict[str, tuple[int, ...]] = {"a": (0,), "b": (1,), "c": (2,)}
    [matrix] = link_matrices(NodeLinks(links, ranks=ranks), tmp_path)
    # Of the two cards between a and b the slower one counts.
    assert matrix.rates == ((None, 2e7, None), (None, None, 1e8), (9e7, None, None))
    assert (matrix.names, matrix.usual) == (("a", "b", "c"), 9e7)
    [told_apart] = link_matrices(
        NodeLinks(links, (), ranks, SlowLink(("a", "b"), links[1:2], 2e7, 1e8)), tmp_path
    )
    assert told_apart.usual == 1e8


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"nodes": 3}'])
def test_a_damaged_links_file_affects_nothing_else(tmp_path: Path, text: str) -> None:
    RunBuilder(tmp_path, 2).wrap().train(3).end().save()
    (tmp_path / "links.json").write_text(text)
    assert course(tmp_path).links == ()


def test_a_run_without_records_has_no_series(tmp_path: Path) -> None:
    series = course(RunBuilder(tmp_path, 2).save())
    assert (series.job, series.histograms, series.links) == ((), (), ())
    assert series.ranks == {0: (), 1: ()}


def test_two_modules_are_distinguished(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path, 2).wrap().wrap(module=1)
    for step in range(3):
        builder.step(step)
        builder.step(step, {1: NAMES}, module=1, optimizer=1)
    series = course(builder.end().save())
    assert only(series.job, SeriesKind.DIFFERING, "module 0") == {0: 0.0, 1: 0.0, 2: 0.0}
    assert only(series.job, SeriesKind.DIFFERING, "module 1") == {0: 3.0, 1: 3.0, 2: 3.0}


def test_node_samples_are_related_to_steps(tmp_path: Path) -> None:
    gpu = {"busy": 50, "memory": 7, "nvlink": [[100], [300]], "pcie_rate": [11, 22], "processes": {"100": 5}}
    nodes = [[Interface("lo", 4.0, loopback=True), Interface("eth0", float(BYTES), 1000)] for _ in range(2)]
    cluster = Cluster(tmp_path, nodes, more_samples={"gpus": [gpu], "ranks": {"0": [100, 1, 0, 0]}})
    cluster.build()
    series = course(tmp_path)
    sent = only(series.job, SeriesKind.NETWORK_SENT, "node1")
    assert set(sent.values()) == {float(BYTES)}
    assert set(only(series.job, SeriesKind.LOOPBACK_RECEIVED, "node0").values()) == {4.0}
    # The first sample has no previous one.
    assert sorted(sent) == list(range(1, cluster.steps))
    assert not [one for one in series.job if one.figure is SeriesKind.INFINIBAND_SENT]
    assert set(only(series.ranks[0], SeriesKind.GPU_BUSY).values()) == {50.0}
    assert set(only(series.ranks[0], SeriesKind.PCIE_SENT).values()) == {11.0}
    assert set(only(series.ranks[0], SeriesKind.PCIE_RECEIVED).values()) == {22.0}
    assert set(only(series.ranks[0], SeriesKind.NVLINK_SENT).values()) == {0.0}
    assert not [one for one in series.ranks[1] if one.figure is SeriesKind.GPU_BUSY]
    assert [series.when(step) for step in (0, 1, 2.5, 59, 99)] == [
        START + 1,
        START + 2,
        START + 3.5,
        START + 60,
        START + 60,
    ]


def test_of_very_many_ranks_those_that_findings_name(tmp_path: Path) -> None:
    ranks = MOST_RANKS + 6
    builder = RunBuilder(tmp_path, ranks).wrap().optimizer()
    for step in range(4):
        builder.step(step, {7: NAMES[:1], 66: NAMES[:1]} if step > 1 else None)
    for rank in builder.ranks:
        builder.add(rank, LossRecord(0, 0, [float(rank)] * 4))
    series = course(builder.end().save())
    assert list(series.ranks) == [7, 66]
    assert list(series.spread) == ["least", "median", "most"]
    assert only(series.spread["least"], SeriesKind.LOSS) == dict.fromkeys(range(4), 0.0)
    assert only(series.spread["median"], SeriesKind.LOSS) == dict.fromkeys(range(4), (ranks - 1) / 2)
    assert only(series.spread["most"], SeriesKind.LOSS) == dict.fromkeys(range(4), ranks - 1.0)
    assert only(series.spread["least"], SeriesKind.AGREEMENT) == {0: 1.0, 1: 1.0, 2: 0.0, 3: 0.0}


def test_no_more_ranks_are_listed_than_the_limit(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path, 200).wrap().optimizer()
    builder.step(0, dict.fromkeys(range(1, 90), NAMES))
    assert len(course(builder.end().save()).ranks) == MOST_NAMED


def test_a_long_series_keeps_the_same_steps_on_every_rank() -> None:
    all_series = named_series(
        SeriesKind.LOSS, range(5000), [float(step) for step in range(5000)], MAX_REPORT_POINTS
    )
    late = named_series(
        SeriesKind.LOSS, range(3, 5000), [float(step) for step in range(3, 5000)], MAX_REPORT_POINTS
    )
    assert all_series is not None
    assert late is not None
    assert len(all_series.steps) <= MAX_REPORT_POINTS + 1
    assert list(all_series.steps)[1:] == list(late.steps)
    assert (all_series.steps[-1], all_series.values[-1]) == (4999, 4999.0)
    unaligned = named_series(SeriesKind.LOSS, range(1, 8001, 8), [1.0] * 1000, 100)
    assert unaligned is not None
    assert 50 < len(unaligned.steps) <= 101
    assert named_series(SeriesKind.LOSS, [1, 2], [None, None], 10) is None


def test_losses_of_a_long_job_stay_few_and_damage_is_left_out() -> None:
    losses = LossSeries()
    losses.add(LossRecord(0, 0, [float(step) for step in range(5000)]))
    assert losses.every == 8
    assert len(losses.steps) <= MOST_STEPS
    assert list(losses.steps) == [int(value) for value in losses.values] == list(range(0, 5000, 8))
    losses = LossSeries()
    losses.add(LossRecord(0, 0, [1.0, None, "what", [1], True, "inf", 2]))  # type: ignore[list-item]
    losses.add(LossRecord(0, 3, [9.0]))
    assert list(zip(losses.steps, losses.values, strict=True)) == [(0, 1.0), (5, math.inf), (6, 2.0)]


def digest_record(root: str, leaves: str) -> DigestRecord:
    return DigestRecord(0, "params", 0, root, leaves, 1)


def test_differing_parameters_are_counted_over_all_ranks() -> None:
    # Base64 of one byte a parameter: (1,2,3), (1,9,3), (8,2,3) and one that is cut short.
    a, b, c, cut = (
        digest_record("a", "AQID"),
        digest_record("b", "AQkD"),
        digest_record("c", "CAID"),
        digest_record("d", "AQI="),
    )
    assert differing([a, a]) == 0
    assert differing([a, b, a]) == 1
    assert differing([a, b, c]) == 2
    assert differing([a, cut]) == 1
    # Leaves are truncated: roots may differ although no leaf does.
    assert differing([a, digest_record("e", "AQID")]) == 1
    assert differing([digest_record("a", "?"), digest_record("b", "!")]) == 1


def test_a_single_step_at_which_ranks_differ_is_never_lost() -> None:
    losses = DifferingSeries()
    for step in range(5000):
        losses.note(step, [digest_record("a", "AQID"), digest_record("b" if step == 3333 else "a", "AQkD")])
    assert len(losses.points) <= MOST_DIFFERING
    assert {number: count for number, count in losses.points.items() if count} == {3333 // losses.every: 1}
