"""DDP103: ranks built different parameters, or the same ones in a different order."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.aggregate.agreement import groups_of, outlier_ranks
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage

_SAME_ORDER = (
    "Build the model in the same order on every rank: iterate over lists or sorted names, never over sets, and "
    "keep rank-dependent conditions out of the constructor."
)
_SAME_IGNORED = (
    "Let DDP ignore the same parameters on every rank; what one rank alone trains belongs outside DDP."
)


def find(case: RuleContext) -> list[Finding]:
    return [finding for module in case.modules() for finding in _of_module(case, module)]


def _of_module(case: RuleContext, module: ModuleKey) -> list[Finding]:
    rows = {rank: data.as_wrapped[module].parameters for rank, data in case.attempt.of_module(module).items()}
    # Shapes and dtypes count: DDP compares them too, but its error does not name the parameter.
    said = {rank: repr([row[:3] for row in rows[rank]]) for rank in rows}
    groups = groups_of(said)
    if len(groups) < 2:
        return []
    usual, other = rows[groups[0][1][0]], rows[groups[1][1][0]]
    place, parameter = _first_difference(usual, other)
    odd = outlier_ranks([ranks for _, ranks in groups])
    same_set = {row[0] for row in usual} == {row[0] for row in other}
    cause = "the same names in another order" if same_set else "different sets of parameters"
    ignored = {rank: data.as_wrapped[module].ignored for rank, data in case.attempt.of_module(module).items()}
    differently = len({tuple(names) for names in ignored.values()}) > 1
    if differently:
        cause = "DDP was told to ignore different parameters: the ignored ones are not the same on all ranks"
    evidence: dict[str, Any] = {
        "position": place,
        "at_that_position": [
            {"ranks": list(ranks), "parameter": _describe(rows[ranks[0]], place)} for _, ranks in groups
        ],
    }
    if differently:
        evidence["ignored"] = {str(rank): ", ".join(names) or "nothing" for rank, names in ignored.items()}
    return [
        case.finding(
            "DDP103",
            f"Parameter number {place} is {_describe(usual, place)} on {name_ranks(groups[0][1])} and "
            f"{_describe(other, place)} on {name_ranks(groups[1][1])}. DDP pairs parameters by position.",
            module=module,
            stage=Stage.INIT_BEFORE.value,
            parameter=parameter,
            ranks=odd,
            evidence=evidence,
            cause=cause,
            fix=_SAME_IGNORED if differently else _SAME_ORDER,
        )
    ]


def _first_difference(usual: list[list[Any]], other: list[list[Any]]) -> tuple[int, str]:
    for place, (a, b) in enumerate(zip(usual, other, strict=False)):
        if a[:3] != b[:3]:
            return place, str(a[0])
    place = min(len(usual), len(other))
    longer = usual if len(usual) > len(other) else other
    return place, str(longer[place][0])


def _describe(rows: list[list[Any]], place: int) -> str:
    if place >= len(rows):
        return "not there"
    name, dtype, shape, _ = rows[place]
    return f"{name} ({dtype} {'x'.join(map(str, shape)) or 'scalar'})"
