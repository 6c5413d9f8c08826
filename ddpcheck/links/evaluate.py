"""Explains a matrix of bandwidths by a few causes, each of which slows a set of links by one factor.

The model is additive in logarithms: the rate of a link is the usual rate of its class, divided by the factor of every
cause that affects it, times noise. Noise is Laplace distributed, so the best fit is the median, which outliers do not
move. Sets of causes are compared by posterior weight; a cause is reported if the sets that contain it have nearly all
the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, median

from ddpcheck.links.model import BETWEEN, WITHIN, LinkExplanation, MeasuredLink, Node

Cell = tuple[int, int]  # from, to


@dataclass(frozen=True)
class Hypothesis:
    """A cause with the links it slows down. `family`: number of hypotheses of this kind."""

    kind: str
    units: tuple[int, ...]
    cells: frozenset[Cell]
    family: int


def between_nodes(rates: Mapping[Cell, float]) -> list[Hypothesis]:
    """Hypotheses for a complete matrix."""
    units = _units(rates)
    return _distinct([*_of_units(units, rates), *_of_pairs(rates), *_islands(units, rates)], rates)


def within_nodes(rates: Mapping[Cell, float], groups: Sequence[Sequence[int]]) -> list[Hypothesis]:
    """Hypotheses for links inside several nodes, which form one class."""
    inside = [
        Hypothesis("slow inside", (number,), frozenset(c for c in rates if set(c) <= set(group)), len(groups))
        for number, group in enumerate(groups)
    ]
    return _distinct([*inside, *_of_units(_units(rates), rates), *_of_pairs(rates)], rates)


def _of_units(units: Sequence[int], cells: Iterable[Cell]) -> Iterator[Hypothesis]:
    cells = list(cells)
    for unit in units:
        sent = frozenset(cell for cell in cells if cell[0] == unit)
        received = frozenset(cell for cell in cells if cell[1] == unit)
        yield Hypothesis("slow node", (unit,), sent | received, len(units))
        yield Hypothesis("slow sending", (unit,), sent, 2 * len(units))
        yield Hypothesis("slow receiving", (unit,), received, 2 * len(units))


def _of_pairs(cells: Iterable[Cell]) -> Iterator[Hypothesis]:
    cells = set(cells)
    for a, b in sorted(cells):
        yield Hypothesis("slow direction", (a, b), frozenset({(a, b)}), len(cells))
        if a < b and (b, a) in cells:
            yield Hypothesis("slow link", (a, b), frozenset({(a, b), (b, a)}), max(1, len(cells) // 2))


def _islands(units: Sequence[int], rates: Mapping[Cell, float]) -> Iterator[Hypothesis]:
    """Partitions into two groups of at least two: those obtained by cutting one edge of the fastest tree.

    Inside an island links are fast, so the tree of fastest links crosses between two islands only once.
    """
    for small in _cuts(units, rates):
        if 2 <= len(small) <= len(units) - 2:
            crossing = frozenset(cell for cell in rates if (cell[0] in small) != (cell[1] in small))
            # Cuts are selected from the rates, so the family counts all possible partitions.
            yield Hypothesis("islands", tuple(sorted(small)), crossing, 2 ** (len(units) - 1))


def _cuts(units: Sequence[int], rates: Mapping[Cell, float]) -> Iterator[set[int]]:
    tree = _fastest_tree(units, rates)
    for left_out in tree:
        neighbours: dict[int, set[int]] = {unit: set() for unit in units}
        for a, b in tree:
            if (a, b) != left_out:
                neighbours[a].add(b)
                neighbours[b].add(a)
        reached, frontier = {left_out[0]}, [left_out[0]]
        while frontier:
            fresh = neighbours[frontier.pop()] - reached
            reached |= fresh
            frontier.extend(fresh)
        yield reached if 2 * len(reached) <= len(units) else set(units) - reached


def _fastest_tree(units: Sequence[int], rates: Mapping[Cell, float]) -> list[Cell]:
    """A spanning tree of the fastest links; a link is as fast as its slower direction."""

    def rate(a: int, b: int) -> float:
        return min(rates.get((a, b), 0.0), rates.get((b, a), 0.0))

    reached, tree = [units[0]], list[Cell]()
    waiting = list(units[1:])
    while waiting:
        a, b = max(((a, b) for a in reached for b in waiting), key=lambda pair: rate(*pair))
        tree.append((a, b))
        reached.append(b)
        waiting.remove(b)
    return tree


def _units(cells: Iterable[Cell]) -> list[int]:
    return sorted({unit for cell in cells for unit in cell})


def _distinct(hypotheses: Sequence[Hypothesis], cells: Iterable[Cell]) -> list[Hypothesis]:
    """Of causes with the same links keep the last, the most specific; drop those with all links or none."""
    every = frozenset(cells)
    by_cells = {one.cells: one for one in hypotheses if one.cells and one.cells != every}
    return list(by_cells.values())


# Lower bound of the noise of a link, relative to its rate.
LEAST_NOISE = 0.05
# Confidence from which a cause is reported.
LEAST_CONFIDENCE = 0.95
# Beam search: number of sets of zero, one and two causes to extend, and of causes to try with each.
_BEAM = ((1, 48), (3, 16), (2, 12))
_FIT_ITERATIONS = 4
# With this many links the noise is doubled; with many more it is what repetitions show.
_FEW_LINKS = 4
# Prior penalty of each cause beyond the first: one job in twenty has another one.
_PENALTY_OF_ANOTHER = log(20)
# Sets with a log weight this far below the best are dropped.
_FAR_BEHIND = 30.0


@dataclass(frozen=True)
class SlowLinkCause:
    """An accepted hypothesis, with the factor by which it slows its links."""

    hypothesis: Hypothesis
    factor: float
    confidence: float
    rate: float
    usual: float


@dataclass(frozen=True)
class _Model:
    """A set of causes, the log slowdown of each, and the log weight of the set."""

    causes: tuple[Hypothesis, ...]
    slowdowns: tuple[float, ...]
    usual: float
    weight: float


def explain(
    rates: Mapping[Cell, float],
    hypotheses: Sequence[Hypothesis],
    *,
    tolerance: float,
    noise: float = LEAST_NOISE,
) -> list[SlowLinkCause]:
    """The causes that slow links by more than `tolerance`, the strongest first.

    `noise`: relative spread of repeated measurements of one link.
    """
    if len(rates) < 2:
        return []
    levels = {cell: log(rate) for cell, rate in rates.items()}
    # Repetitions of one message, and few links, underestimate the noise.
    floor = max(noise, LEAST_NOISE) * (1 + _FEW_LINKS / len(levels))
    models = _search(levels, hypotheses, floor)
    best = max(models, key=lambda model: model.weight)
    candidates = [
        SlowLinkCause(
            one,
            exp(slowdown),
            _confidence(one, models, best.weight),
            rate=median(rates[cell] for cell in one.cells),
            usual=exp(best.usual),
        )
        for one, slowdown in zip(best.causes, best.slowdowns, strict=True)
    ]
    sure = [one for one in candidates if one.confidence >= LEAST_CONFIDENCE and one.factor >= tolerance]
    return sorted(sure, key=lambda cause: -cause.factor)


def _confidence(cause: Hypothesis, models: Sequence[_Model], best: float) -> float:
    """The share of the weight of sets that contain this cause."""
    weights = [(exp(model.weight - best), cause in model.causes) for model in models]
    return sum(weight for weight, has in weights if has) / sum(weight for weight, _ in weights)


def _search(levels: Mapping[Cell, float], hypotheses: Sequence[Hypothesis], floor: float) -> list[_Model]:
    """Beam search: extend the best sets by one cause at a time."""
    beam = [_fit(levels, (), floor)]
    models = {frozenset[Hypothesis](): beam[0]}
    for most_sets, most_tried in _BEAM:
        grown: list[_Model] = []
        for model in beam[:most_sets]:
            for one in _promising(levels, model, hypotheses)[:most_tried]:
                causes = frozenset({*model.causes, one})
                if causes not in models:
                    models[causes] = _fit(levels, (*model.causes, one), floor)
                    grown.append(models[causes])
        leader = max(model.weight for model in models.values())
        grown = [model for model in grown if model.weight > leader - _FAR_BEHIND]
        beam = sorted(grown, key=lambda model: -model.weight)
    return [model for model in models.values() if model.weight > float("-inf")]


def _promising(
    levels: Mapping[Cell, float], model: _Model, hypotheses: Sequence[Hypothesis]
) -> list[Hypothesis]:
    """Hypotheses sorted by how much slower their links are than the model predicts."""
    left = _residuals(levels, model.causes, model.slowdowns, model.usual)

    def promise(one: Hypothesis) -> float:
        return -sum(left[cell] for cell in one.cells) / sqrt(len(one.cells))

    new = [one for one in hypotheses if one not in model.causes]
    return sorted(new, key=promise, reverse=True)


def _fit(levels: Mapping[Cell, float], causes: tuple[Hypothesis, ...], floor: float) -> _Model:
    """Fit the slowdown of each cause to the residuals of the others, iteratively."""
    slowdowns = [0.0] * len(causes)
    usual = median(levels.values())
    for _ in range(_FIT_ITERATIONS if len(causes) > 1 else 1):
        for index, cause in enumerate(causes):
            others = [0.0 if n == index else slowdown for n, slowdown in enumerate(slowdowns)]
            left = _residuals(levels, causes, others, 0.0)
            usual = median(value for cell, value in left.items() if cell not in cause.cells)
            slowdowns[index] = max(0.0, usual - median(left[cell] for cell in cause.cells))
    if causes and min(slowdowns) <= 0:
        return _Model(causes, tuple(slowdowns), usual, float("-inf"))
    residuals = list(_residuals(levels, causes, slowdowns, usual).values())
    # Penalize each cause for its parameter and for the number of hypotheses of its kind.
    penalty = sum(log(len(levels)) / 2 + log(cause.family) for cause in causes)
    penalty += _PENALTY_OF_ANOTHER * max(0, len(causes) - 1)
    return _Model(causes, tuple(slowdowns), usual, _log_likelihood(residuals, floor) - penalty)


def _residuals(
    levels: Mapping[Cell, float], causes: Sequence[Hypothesis], slowdowns: Sequence[float], usual: float
) -> dict[Cell, float]:
    left = {cell: level - usual for cell, level in levels.items()}
    for cause, slowdown in zip(causes, slowdowns, strict=True):
        for cell in cause.cells if slowdown else ():
            left[cell] += slowdown
    return left


def _log_likelihood(residuals: Sequence[float], floor: float) -> float:
    """Of a Laplace distribution with the best scale, at least the known noise."""
    scale = max(fmean(map(abs, residuals)), floor)
    return -sum(map(abs, residuals)) / scale - len(residuals) * log(2 * scale)


def is_uneven(links: Sequence[MeasuredLink], tolerance: float) -> bool:
    """True if the slowest link of a class is slower than the tolerance allows."""
    rates = [[link.bandwidth for link in links if link.group == group] for group in (BETWEEN, WITHIN)]
    return any(max(each) > tolerance * min(each) for each in rates if each)


def find_slow_links(
    nodes: Sequence[Node], links: Sequence[MeasuredLink], tolerance: float
) -> list[LinkExplanation]:
    """Causes of links that are slower than their class by more than `tolerance`, the worst first."""
    explanations: list[LinkExplanation] = []
    for group in (BETWEEN, WITHIN):
        chosen = [link for link in links if link.group == group]
        if len(chosen) < 2:
            continue
        rates = {(link.source, link.target): link.bandwidth for link in chosen}
        causes = between_nodes(rates) if group == BETWEEN else within_nodes(rates, [n.ranks for n in nodes])
        # A quartile of many messages is more precise than single messages.
        noise = median(link.spread for link in chosen) / 2
        accepted = explain(rates, causes, tolerance=tolerance, noise=noise)
        explanations += [_explanation(cause, group, nodes) for cause in accepted]
    return explanations


def _explanation(cause: SlowLinkCause, group: str, nodes: Sequence[Node]) -> LinkExplanation:
    return LinkExplanation(
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
    """Between nodes a rank represents its host."""
    if hypothesis.kind == "slow inside":
        return next(node.host for number, node in enumerate(nodes) if number == unit)
    host = next(node.host for node in nodes if unit in node.ranks)
    return host if group == BETWEEN else f"rank {unit} on {host}"
