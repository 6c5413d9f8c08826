"""Reductions on a link: one by one, and gloo's two at a time, against cases reckoned by hand and measured ones."""

from __future__ import annotations

import pytest

from ddpcheck.analysis.overlap.link_model import Bucket, GlooLink, LinkModel

MS = 1_000_000
MIB = 1 << 20


def test_one_by_one() -> None:
    link = LinkModel(latency_ns=10, ns_per_byte=1)
    assert link.reduce([Bucket(100, 0), Bucket(50, 20), Bucket(5, 500)]) == [(0, 110), (110, 170), (500, 515)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 64])
def test_gloo_alone_takes_its_latency_and_its_bytes(ranks: int) -> None:
    # Two messages of every rank: they come one after the other, and the last one of a round is waited for.
    (times,) = GlooLink(latency_ns=0, ns_per_byte=1, ranks=ranks).reduce([Bucket(4800, 100)])
    assert times == (100, pytest.approx(4900))
    (times,) = GlooLink(latency_ns=60, ns_per_byte=0, ranks=ranks).reduce([Bucket(4800, 100)])
    assert times == (100, pytest.approx(160))


def test_messages_of_gloo_go_in_the_order_in_which_they_come() -> None:
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
