"""A link fitted to reductions: known ones are found again, and what cannot be told is not made up."""

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
    """Four backwards, the times of which scatter by that share."""
    chance = random.Random(seed)
    seen = []
    for bucket, (start, end) in zip(buckets, true.reduce(buckets), strict=True):
        took = [(end - start) * (1 + chance.gauss(0, noise)) for _ in range(4)]
        seen.append(ObservedReduction(bucket, median(took), stdev(took) / 2))
    return seen


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
        # Behind the bytes of the other reduction hardly any of it can be seen.
        assert 0 <= fit.link.latency_ns < 3 * MS


@pytest.mark.parametrize("seed", range(6))
def test_overlapping_reductions_do_not_make_a_latency_up(seed: int) -> None:
    # The second begins while the first moves bytes: 300 ms on a faster link would look the same as none.
    buckets = [Bucket(5_322_240, 970 * MS), Bucket(1_774_080, 1334 * MS)]
    fit = fitted(GlooLink(0, 0), seen_on(GlooLink(3 * MS, 170), buckets, 0.05, seed))
    assert fit is not None
    assert fit.link.latency_ns < 30 * MS
    assert fit.link.ns_per_byte == pytest.approx(170, rel=0.1)


@pytest.mark.parametrize("seed", range(6))
def test_a_latency_that_shows_is_told(seed: int) -> None:
    sizes = [0.25] * 12 + [1] + [0.25] * 12 + [1]
    buckets = [Bucket(round(size * MIB), number * 5 * MS) for number, size in enumerate(sizes)]
    fit = fitted(GlooLink(0, 0), seen_on(GlooLink(60 * MS, 170), buckets, 0.05, seed))
    assert fit is not None
    assert fit.link.latency_ns == pytest.approx(60 * MS, rel=0.05)


def test_short_reductions_do_not_decide_the_bandwidth() -> None:
    # As measured on 25 Mbit/s: the link's buffer takes 64 KiB at once, which is a lot of the small one.
    seen = [
        ObservedReduction(Bucket(263_168, 0), 69 * MS, 5 * MS),
        ObservedReduction(Bucket(3_150_848, 800 * MS), 1234 * MS, 48 * MS),
    ]
    fit = fitted(GlooLink(0, 0), seen)
    assert fit is not None
    assert fit.link.ns_per_byte * 3_150_848 == pytest.approx(1234 * MS, rel=0.05)
    assert fit.error < 0.1


@pytest.mark.parametrize(
    "seen",
    [
        [],
        [ObservedReduction(Bucket(MIB, 0), MS)],
        [ObservedReduction(Bucket(MIB, 0), MS), ObservedReduction(Bucket(MIB, 50), MS)],
        [ObservedReduction(Bucket(MIB, 0), MS), ObservedReduction(Bucket(4 * MIB, 50), 0)],
    ],
)
def test_what_tells_no_link(seen: list[ObservedReduction]) -> None:
    assert fitted(LinkModel(0, 0), seen) is None
