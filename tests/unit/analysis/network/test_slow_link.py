"""The slow-link detector, with the throughput of connections while busy."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ddpcheck.analysis.network.model import NodeLink
from ddpcheck.analysis.network.slow_link import slow_link

SECONDS = 20.0


def link(
    source: int, target: int, megabits: float, share: float, noise: random.Random | None = None
) -> NodeLink:
    """A link that was busy for `share` of the time."""
    intervals = []
    for _ in range(int(SECONDS)):
        rate = megabits * 125_000 * (noise.lognormvariate(0, 0.15) if noise else 1.0)
        intervals.append((int(rate * share), share))
    total = sum(count for count, _ in intervals)
    return NodeLink(f"n{source}", f"n{target}", total, SECONDS * share, SECONDS, tuple(intervals))


def ring(nodes: int, megabits: dict[tuple[int, int], float], usual: float = 800.0) -> list[NodeLink]:
    """Ring AllReduce: the same bytes over every link, and all links wait for the slowest."""
    pairs = [(node, (node + 1) % nodes) for node in range(nodes)]
    slowest = min(megabits.get(pair, usual) for pair in pairs)
    outlier = []
    for pair in pairs:
        rate = megabits.get(pair, usual)
        # Links that were idle exceed their limit at first.
        outlier.append(
            link(
                *pair, rate if rate == slowest else 5 * rate, slowest / rate * (1 if rate == slowest else 0.2)
            )
        )
    return outlier


@pytest.mark.parametrize("nodes", [3, 4, 8])
@pytest.mark.parametrize("factor", [2, 4, 10])
def test_a_slow_node(nodes: int, factor: float) -> None:
    limited = {(1, 2): 800 / factor, (2, 3 % nodes): 800 / factor}
    outlier = slow_link(ring(nodes, limited))
    assert outlier is not None
    assert outlier.nodes == ("n2",)
    assert outlier.factor >= factor
    assert outlier.bandwidth == pytest.approx(800 / factor * 125_000, rel=0.01)
    assert 0 < outlier.seconds_lost() < SECONDS


def test_one_direction_of_one_link() -> None:
    outlier = slow_link(ring(4, {(1, 2): 100.0}))
    assert outlier is not None
    assert outlier.nodes == ("n1", "n2")
    assert [(one.source, one.target) for one in outlier.links] == [("n1", "n2")]


@pytest.mark.parametrize("nodes", [2, 3, 4, 16])
def test_equal_links_raise_nothing(nodes: int) -> None:
    assert slow_link(ring(nodes, {})) is None


@pytest.mark.parametrize("seed", range(200))
def test_noise_raises_nothing(seed: int) -> None:
    noise = random.Random(seed)
    nodes = noise.choice([2, 3, 4, 8])
    links = [
        link(node, (node + 1) % nodes, noise.uniform(900, 1100), noise.uniform(0.3, 0.9), noise)
        for node in range(nodes)
    ]
    assert slow_link(links) is None


def test_a_link_that_is_slow_but_hardly_used() -> None:
    links = [link(node, (node + 1) % 4, 800, 0.5) for node in range(3)] + [link(3, 0, 100, 0.05)]
    assert slow_link(links) is None


def test_a_short_burst_is_not_a_slow_link() -> None:
    """Traffic of another job for two of twenty seconds."""
    good = [link(node, (node + 1) % 4, 800, 0.2) for node in range(4)]
    intervals = [(20_000_000, 0.2)] * 18 + [(20_000_000, 9.0)] * 2
    bad = NodeLink("n3", "n0", 400_000_000, sum(busy for _, busy in intervals), SECONDS, tuple(intervals))
    assert bad.bandwidth * 3 < good[0].bandwidth
    assert slow_link([*good[:3], bad]) is None


def test_nothing_to_compare_with() -> None:
    assert slow_link([]) is None
    # Two directions of the same link are compared, those of different nodes are not.
    slow = slow_link([link(0, 1, 10, 1.0), link(1, 0, 800, 0.1)])
    assert slow is not None
    assert slow.nodes == ("n0", "n1")
    assert slow_link([link(0, 1, 10, 1.0), link(1, 2, 800, 0.1)]) is None
    assert slow_link([link(0, 1, 500, 1.0), link(1, 0, 800, 0.6)]) is None


def test_small_traffic_is_inconclusive() -> None:
    links = ring(4, {(1, 2): 100.0, (2, 3): 100.0})
    small = [
        NodeLink(one.source, one.target, 1 << 20, one.busy_seconds, SECONDS, one.stretches) for one in links
    ]
    assert slow_link(small) is None


def test_one_of_several_cards_of_a_node() -> None:
    """Two rings over two cards each; the second card of n1 is slow."""
    links = []
    for card in (0, 1):
        for node in range(3):
            slow = card == 1 and 1 in (node, (node + 1) % 3)
            one = link(node, (node + 1) % 3, 100 if slow else 800, 0.8 if slow else 0.1)
            ends = {
                "source_address": f"10.{card}.0.{node}",
                "target_address": f"10.{card}.0.{(node + 1) % 3}",
            }
            links.append(replace(one, **ends))
    outlier = slow_link(links)
    assert outlier is not None
    assert (outlier.nodes, outlier.address, len(outlier.links)) == (("n1",), "10.1.0.1", 2)


def test_links_with_little_traffic_do_not_count() -> None:
    """The store's connection: hardly any bytes, and slow since its messages are small."""
    links = [*ring(4, {(1, 2): 100.0, (2, 3): 100.0}), link(3, 1, 3.0, 1.0)]
    assert links[-1].bytes > 1 << 20
    outlier = slow_link(links)
    assert outlier is not None
    assert outlier.nodes == ("n2",)


def test_two_slow_nodes_are_not_reported() -> None:
    slow = {(0, 1): 100.0, (1, 2): 100.0, (3, 4): 100.0, (4, 5): 100.0}
    assert slow_link(ring(8, slow)) is None
