"""Links are measured pair by pair."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from ddpcheck.links import measure as module
from ddpcheck.links.measure import SurveyOptions, rounds, survey
from ddpcheck.links.model import BETWEEN, LinksReport, MeasuredLink, Node

NODES = [Node(f"host{number}", (number,)) for number in range(4)]
EVEN, ONE_LINK, NODE = 0, 1, 2


def look(kind: int) -> list[MeasuredLink]:
    def rate(a: int, b: int) -> float:
        slow = {EVEN: False, ONE_LINK: (a, b) == (2, 3), NODE: 1 in (a, b)}[kind]
        return 1e8 / (4 if slow else 1)

    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    return [MeasuredLink(a, b, BETWEEN, 1e-4, rate(a, b), 0.05, 1 << 20, 9) for a, b in pairs]


def surveyed(monkeypatch: pytest.MonkeyPatch, *kinds: int) -> tuple[LinksReport, int]:
    """The report of one rank that gets these measurements in turn, and how many were left unused."""
    left = [look(kind) for kind in kinds]
    monkeypatch.setattr(module, "_nodes", lambda: NODES)
    monkeypatch.setattr(module, "_measure_all", lambda *_: left.pop(0))
    monkeypatch.setattr(module, "_from_rank_zero", lambda mine: mine)
    monkeypatch.setattr(module, "sweep_allreduce", lambda *_: [])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    return survey(SurveyOptions(), "cpu"), len(left)


@pytest.mark.parametrize(
    ("kinds", "looks", "slow"),
    [
        ((EVEN,), 1, False),
        ((NODE, EVEN), 2, False),
        ((NODE, NODE, EVEN), 3, False),
        ((NODE, NODE, NODE), 3, True),
    ],
)
def test_only_causes_in_every_measurement_are_reported(
    monkeypatch: pytest.MonkeyPatch, kinds: tuple[int, ...], looks: int, slow: bool
) -> None:
    report, unused = surveyed(monkeypatch, *kinds)
    assert (report.looks, report.slow, unused) == (looks, slow, 0)
    assert [cause.names for cause in report.explanations] == ([("host1",)] if slow else [])


def test_the_best_measurement_of_a_link_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = surveyed(monkeypatch, ONE_LINK, NODE)
    assert {link.bandwidth for link in report.links} == {1e8}


@pytest.mark.parametrize("count", range(9))
def test_every_pair_meets_once_in_disjoint_rounds(count: int) -> None:
    plan = rounds(range(count))
    for pairs in plan:
        busy = [unit for pair in pairs for unit in pair]
        assert len(busy) == len(set(busy))
    met = sorted(tuple(sorted(pair)) for pairs in plan for pair in pairs)
    assert met == list(combinations(range(count), 2))
    assert len(plan) <= count
