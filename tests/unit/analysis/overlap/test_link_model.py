"""Link models fitted to reductions: known links are recovered, and insufficient data gives no fit."""

from __future__ import annotations

import random
from statistics import median, stdev

import pytest

from ddpcheck.analysis.overlap.link_model import Bucket, GlooLink, LinkModel, ObservedReduction, fitted

MS = 1_000_000
MIB = 1 << 20


def seen_on(
    true: LinkModel, buckets: list[Bucket], noise: float = 0.0, seed: int = 0
) -> list[ObservedReduction]:
    """Four backwards whose times vary by that share."""
    chance = random.Random(seed)
    observed = []
    for bucket, (start, end) in zip(buckets, true.reduce(buckets), strict=True):
        took = [(end - start) * (1 + chance.gauss(0, noise)) for _ in range(4)]
        observed.append(ObservedReduction(bucket, median(took), stdev(took) / 2))
    return observed


@pytest.mark.parametrize("kind", [LinkModel(0, 0), GlooLink(0, 0), GlooLink(0, 0, ranks=8)])
@pytest.mark.parametrize("spacing", [0, 3, 60])
def test_a_known_link_is_found_again(kind: LinkModel, spacing: int) -> None:
    true = type(kind)(**{**vars(kind), "latency_ns": 2 * MS, "ns_per_byte": 10})
    buckets = [
        Bucket(size * MIB, number * spacing * MS) for number, size in enumerate((1, 4, 4, 8, 2, 4, 1, 8))
    ]
    fit = fitted(kind, seen_on(true, buckets))
    assert fit is not None
    assert fit.error < 0.05
    assert fit.link.ns_per_byte == pytest.approx(10, rel=0.05)
    if kind == LinkModel(0, 0):
        assert fit.link.latency_ns == pytest.approx(2 * MS, rel=0.5)
    else:
        # The transfer of the other reduction hides nearly all of it.
        assert 0 <= fit.link.latency_ns < 3 * MS


@pytest.mark.parametrize("seed", range(6))
def test_overlapping_reductions_do_not_imply_a_latency(seed: int) -> None:
    # The second begins while the first moves bytes: 300 ms on a faster link would fit as well as none.
    buckets = [Bucket(5_322_240, 970 * MS), Bucket(1_774_080, 1334 * MS)]
    fit = fitted(GlooLink(0, 0), seen_on(GlooLink(3 * MS, 170), buckets, 0.05, seed))
    assert fit is not None
    assert fit.link.latency_ns < 30 * MS
    assert fit.link.ns_per_byte == pytest.approx(170, rel=0.1)


@pytest.mark.parametrize("seed", range(6))
def test_a_significant_latency_is_fitted(seed: int) -> None:
    sizes = [0.25] * 12 + [1] + [0.25] * 12 + [1]
    buckets = [Bucket(round(size * MIB), number * 5 * MS) for number, size in enumerate(sizes)]
    fit = fitted(GlooLink(0, 0), seen_on(GlooLink(60 * MS, 170), buckets, 0.05, seed))
    assert fit is not None
    assert fit.link.latency_ns == pytest.approx(60 * MS, rel=0.05)


def test_short_reductions_do_not_decide_the_bandwidth() -> None:
    # As measured on 25 Mbit/s: the buffer of the link takes 64 KiB at once, a large share of the small reduction.
    observed = [
        ObservedReduction(Bucket(263_168, 0), 69 * MS, 5 * MS),
        ObservedReduction(Bucket(3_150_848, 800 * MS), 1234 * MS, 48 * MS),
    ]
    fit = fitted(GlooLink(0, 0), observed)
    assert fit is not None
    assert fit.link.ns_per_byte * 3_150_848 == pytest.approx(1234 * MS, rel=0.05)
    assert fit.error < 0.1


@pytest.mark.parametrize(
    "observed",
    [
        [],
        [ObservedReduction(Bucket(MIB, 0), MS)],
        [ObservedReduction(Bucket(MIB, 0), MS), ObservedReduction(Bucket(MIB, 50), MS)],
        [ObservedReduction(Bucket(MIB, 0), MS), ObservedReduction(Bucket(4 * MIB, 50), 0)],
    ],
)
def test_measurements_that_do_not_determine_a_link(observed: list[ObservedReduction]) -> None:
    assert fitted(LinkModel(0, 0), observed) is None


def test_one_by_one() -> None:
    link = LinkModel(latency_ns=10, ns_per_byte=1)
    assert link.reduce([Bucket(100, 0), Bucket(50, 20), Bucket(5, 500)]) == [(0, 110), (110, 170), (500, 515)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 64])
def test_a_single_gloo_reduction_takes_latency_and_transfer(ranks: int) -> None:
    # Two messages of every rank: they come one after the other, and the last one of a round is waited for.
    (times,) = GlooLink(latency_ns=0, ns_per_byte=1, ranks=ranks).reduce([Bucket(4800, 100)])
    assert times == (100, pytest.approx(4900))
    (times,) = GlooLink(latency_ns=60, ns_per_byte=0, ranks=ranks).reduce([Bucket(4800, 100)])
    assert times == (100, pytest.approx(160))


def test_gloo_sends_messages_in_order() -> None:
    link = GlooLink(latency_ns=0, ns_per_byte=1)
    # Four messages of 100 and four of 10. The small ones pass two by two: at 220, and the others at 440.
    assert link.reduce([Bucket(400, 0), Bucket(40, 0)]) == [(0, 420), (0, 440)]


def test_gloo_runs_two_at_a_time() -> None:
    times = GlooLink(latency_ns=0, ns_per_byte=1).reduce([Bucket(400, 0), Bucket(40, 0), Bucket(4, 0)])
    assert times[2] == (420, 444)


def test_one_of_gloos_moves_bytes_while_the_other_waits() -> None:
    # Each of them alone: 100 of latency, 100 of bytes.
    both = GlooLink(latency_ns=100, ns_per_byte=1).reduce([Bucket(100, 0), Bucket(100, 0)])
    assert max(end for _, end in both) < 350


# Two AllReduces of gloo between two hosts with 50 Mbit/s and 20 ms there and back: sizes in MiB, when the second began,
# and how long both took, in milliseconds.
MEASURED = [
    (5.0757, 1.6919, 358, 1206, 691),
    (5.0757, 1.6919, 179, 1197, 870),
    (4, 1, 35, 799, 851),
    (4, 1, 283, 799, 604),
    (1, 4, 18, 537, 870),
    (8, 1, 424, 1591, 817),
    (8, 4, 141, 2115, 1272),
    (1, 0.25, 9, 208, 222),
    (2, 0.25, 106, 385, 300),
    (0.25, 2, 4, 234, 401),
]


@pytest.mark.parametrize(("first", "second", "after", "first_took", "second_took"), MEASURED)
def test_gloo_as_measured(
    first: float, second: float, after: float, first_took: float, second_took: float
) -> None:
    link = GlooLink(latency_ns=20 * MS, ns_per_byte=1e3 / 6.03)
    times = link.reduce([Bucket(round(first * MIB), 0), Bucket(round(second * MIB), round(after * MS))])
    took = [(end - start) / MS for start, end in times]
    assert took == pytest.approx([first_took, second_took], rel=0.08)
