"""DDP103: ranks built different parameters, or the same ones in a different order."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.aggregate.agreement import groups_of, outlier_ranks
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.digests import Stage
from ddpcheck.rules.rule import Location, Need, Rule

RULE = Rule(
    code="DDP103",
    severity=Severity.ERROR,
    title="Ranks built different parameters, or the same ones in a different order",
    summary="ranks built different parameters, or the same ones in a different order",
    needs=(Need.PARAMETERS_AFTER_WRAPPING,),
    live=True,
    replicas_diverge=True,
    location=Location.WRAPPING,
    # Different parameters cause different buffers and values (DDP101).
    order=100,
)

_SAME_ORDER = (
    "Build the model in the same order on every rank: iterate over lists or sorted names, never over sets, and "
    "keep conditions that depend on the rank out of the constructor."
)
_SAME_TYPE = (
    "Build the model with the same sizes and convert it to the same dtype on every rank before wrapping: keep what "
    "depends on the rank, its device or its files out of both."
)
_SAME_IGNORED = (
    "Let DDP ignore the same parameters on every rank. Keep parameters that only one rank trains outside DDP."
)


def find(context: RuleContext) -> list[Finding]:
    return [finding for module in context.modules() for finding in _of_module(context, module)]


def _of_module(context: RuleContext, module: ModuleKey) -> list[Finding]:
    wrapped = {rank: data.as_wrapped[module] for rank, data in context.attempt.of_module(module).items()}
    rows = {rank: record.parameters for rank, record in wrapped.items()}
    # Shapes and dtypes count: DDP compares them too, but its error does not name the parameter.
    groups = groups_of({rank: repr([row[:3] for row in rows[rank]]) for rank in rows})
    if len(groups) < 2:
        return []
    majority, other = rows[groups[0][1][0]], rows[groups[1][1][0]]
    index, parameter = _first_difference(majority, other)
    ignored = {rank: record.ignored for rank, record in wrapped.items()}
    ignored_differ = len({tuple(names) for names in ignored.values()}) > 1
    evidence: dict[str, Any] = {
        "position": index,
        "at_that_position": [
            {"ranks": list(ranks), "parameter": _describe(rows[ranks[0]], index)} for _, ranks in groups
        ],
    }
    if ignored_differ:
        cause = (
            "DDP is configured to ignore different parameters: the ignored ones are not the same on all ranks"
        )
        evidence["ignored"] = {str(rank): ", ".join(names) or "nothing" for rank, names in ignored.items()}
    elif [row[0] for row in majority] == [row[0] for row in other]:
        cause = f"the same parameters with {_other_property(majority[index], other[index])}"
    elif {row[0] for row in majority} == {row[0] for row in other}:
        cause = "the same names in another order"
    else:
        cause = "different sets of parameters"
    return [
        context.finding(
            RULE,
            f"Parameter number {index} is {_describe(majority, index)} on {name_ranks(groups[0][1])} and "
            f"{_describe(other, index)} on {name_ranks(groups[1][1])}. DDP pairs parameters by position.",
            module=module,
            stage=Stage.INIT_BEFORE.value,
            parameter=parameter,
            ranks=outlier_ranks([ranks for _, ranks in groups]),
            evidence=evidence,
            cause=cause,
            fix=_SAME_IGNORED
            if ignored_differ
            else _SAME_TYPE
            if cause.startswith("the same p")
            else _SAME_ORDER,
        )
    ]


def _first_difference(majority: list[list[Any]], other: list[list[Any]]) -> tuple[int, str]:
    for index, (a, b) in enumerate(zip(majority, other, strict=False)):
        if a[:3] != b[:3]:
            return index, str(a[0])
    index = min(len(majority), len(other))
    longer = majority if len(majority) > len(other) else other
    return index, str(longer[index][0])


def _other_property(one: list[Any], other: list[Any]) -> str:
    if one[1] != other[1]:
        return f"another dtype ({one[1]}, {other[1]})" + ("" if one[2] == other[2] else " and shape")
    return "another shape"


def _describe(rows: list[list[Any]], index: int) -> str:
    if index >= len(rows):
        return "missing"
    name, dtype, shape, _ = rows[index]
    return f"{name} ({dtype} {'x'.join(map(str, shape)) or 'scalar'})"
