"""From measured links to what explains them, class by class."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ddpcheck.links.evaluate import Cause, explain
from ddpcheck.links.hypotheses import Hypothesis, between_nodes, within_nodes
from ddpcheck.links.model import BETWEEN, WITHIN, Explanation, Link, Node


def is_uneven(links: Sequence[Link], tolerance: float) -> bool:
    """Whether the slowest link of a class is slower than the tolerance allows, whatever the reason."""
    rates = [[link.bandwidth for link in links if link.group == group] for group in (BETWEEN, WITHIN)]
    return any(max(each) > tolerance * min(each) for each in rates if each)


def judge(nodes: Sequence[Node], links: Sequence[Link], tolerance: float) -> list[Explanation]:
    """What makes links slower than `tolerance` times their class, the worst first."""
    told: list[Explanation] = []
    for group in (BETWEEN, WITHIN):
        chosen = [link for link in links if link.group == group]
        if len(chosen) < 2:
            continue
        rates = {(link.source, link.target): link.bandwidth for link in chosen}
        causes = between_nodes(rates) if group == BETWEEN else within_nodes(rates, [n.ranks for n in nodes])
        # A quartile of many messages is known better than the messages scatter.
        noise = median(link.spread for link in chosen) / 2
        found = explain(rates, causes, tolerance=tolerance, noise=noise)
        told += [_explanation(cause, group, nodes) for cause in found]
    return told


def _explanation(cause: Cause, group: str, nodes: Sequence[Node]) -> Explanation:
    return Explanation(
        kind=cause.hypothesis.kind,
        group=group,
        names=tuple(_name(cause.hypothesis, unit, group, nodes) for unit in cause.hypothesis.units),
        factor=round(cause.factor, 2),
        confidence=round(cause.confidence, 4),
        bandwidth=cause.rate,
        usual=cause.usual,
        links=len(cause.hypothesis.cells),
    )


def _name(hypothesis: Hypothesis, unit: object, group: str, nodes: Sequence[Node]) -> str:
    """Between nodes a rank stands for its host."""
    if hypothesis.kind == "slow inside":
        return next(node.host for number, node in enumerate(nodes) if number == unit)
    host = next(node.host for node in nodes if unit in node.ranks)
    return host if group == BETWEEN else f"rank {unit} on {host}"
