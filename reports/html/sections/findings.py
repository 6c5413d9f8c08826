"""Findings, the gravest first, each with its evidence, its likely cause and the fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ddpcheck.analysis.finding import Finding
from ddpcheck.formatting import name_ranks, rank_ranges
from ddpcheck.reports.finding_text import script_line
from ddpcheck.reports.html.context import PageContext
from ddpcheck.reports.html.markup import Html, joined, table, tag
from ddpcheck.reports.safe_text import shortened
from ddpcheck.reports.terminal.evidence import (
    column_header,
    elements_heading,
    equal_ranks,
    rank_order,
    spoken,
    spoken_evidence,
)
from ddpcheck.reports.verdict import in_order

_MOST_COLUMNS = 16
_MOST_ROWS = 40
_MOST_CHARACTERS = 2000
_MOST_GROUPS = 24


def evidence(pieces: Mapping[str, Any], odd: Collection[int]) -> Html | None:
    """One block for each piece, in the order the rule gave them."""
    blocks = [_block(key, value, odd) for key, value in pieces.items()]
    return tag("div", *blocks, class_="evidence") if blocks else None


def _block(key: str, value: Any, odd: Collection[int]) -> Html:
    layout = _LAYOUTS.get(key)
    if layout is not None:
        try:
            return layout(value, odd)
        except (KeyError, TypeError, ValueError, AttributeError):
            # Rules of another version may shape their evidence otherwise; it is still worth showing.
            pass
    return _generic(key, value)


def _generic(key: str, value: Any) -> Html:
    label = key.replace("_", " ")
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, Mapping) for item in value):
        return joined([tag("p", f"{label}:"), _mappings(label, value)])
    return tag("p", f"{label}: ", tag("span", shortened(spoken_evidence(key, value), _MOST_CHARACTERS)))


def _mappings(label: str, rows: Sequence[Mapping[str, Any]]) -> Html:
    """Things of one shape, one a row."""
    names = list(dict.fromkeys(str(name) for row in rows for name in row))
    cells = [
        [shortened(spoken_evidence(name, row[name]), 300) if name in row else "" for name in names]
        for row in rows[:_MOST_ROWS]
    ]
    more = tag("p", f"and {len(rows) - _MOST_ROWS} more") if len(rows) > _MOST_ROWS else None
    return joined([table([name.replace("_", " ") for name in names], cells, label), more])


def _groups(groups: Sequence[Mapping[str, Any]], odd: Collection[int]) -> Html:
    rows = [
        [
            name_ranks(group["ranks"]),
            tag("td", tag("code", group.get("digest") or "not recorded"), class_=_mark(group["ranks"], odd)),
        ]
        for group in groups[:_MOST_GROUPS]
    ]
    left_out = groups[_MOST_GROUPS:]
    more = sum(len(group["ranks"]) for group in left_out)
    return joined(
        [
            tag("p", "Who holds the same bits:"),
            table(("ranks", "digest"), rows, "Ranks that hold the same bits"),
            tag("p", f"and {more} more ranks in {len(left_out)} groups") if left_out else None,
        ]
    )


def _mark(ranks: Collection[int], odd: Collection[int]) -> str | None:
    return "odd" if set(ranks) <= set(odd) else None


def _parameters(parameters: Mapping[str, Any], odd: Collection[int]) -> Html:
    if not parameters["count"]:
        return tag("p", f"Which of the {parameters['of']} tensors differ was not recorded.")
    names = [item for name in parameters["names"] for item in (", ", tag("code", name))][1:]
    left_out = parameters["count"] - len(parameters["names"])
    more = f" and {left_out} more" if left_out > 0 else ""
    return tag("p", f"{parameters['count']} of {parameters['of']} tensors differ: ", *names, more)


def _elements(elements: Mapping[str, Any], odd: Collection[int]) -> Html:
    rows = [(_index(value["index"]), value["by_rank"]) for value in elements.get("values") or ()]
    heading = tag("p", elements_heading(elements))
    if not rows:
        return heading
    return joined([heading, _side_by_side("element", rows, str(elements.get("dtype") or ""))])


def _index(index: Any) -> str:
    return "[" + ", ".join(map(str, index)) + "]" if isinstance(index, (list, tuple)) else str(index)


def _hyperparameters(values: Sequence[Mapping[str, Any]], odd: Collection[int]) -> Html:
    rows = [
        (f"optimizer {value['optimizer']}, group {value['group']}, {value['name']}", value["by_rank"])
        for value in values
    ]
    return joined([tag("p", "Optimizer settings that differ:"), _side_by_side("setting", rows)])


def _side_by_side(corner: str, rows: Sequence[tuple[str, Mapping[str, Any]]], dtype: str = "") -> Html:
    """One column a rank, or one for ranks with equal values where there are many."""
    rows = [(place, {str(rank): value for rank, value in by_rank.items()}) for place, by_rank in rows]
    ranks = sorted({rank for _, by_rank in rows for rank in by_rank}, key=rank_order)
    groups = [[rank] for rank in ranks]
    if len(groups) > _MOST_COLUMNS:
        groups = equal_ranks(ranks, rows)
    shown = groups[:_MOST_COLUMNS]
    left_out = sum(map(len, groups[_MOST_COLUMNS:]))
    headers = [corner, *map(column_header, shown), *([f"({left_out} more ranks)"] if left_out else [])]
    body = [
        [tag("th", place, scope="row"), *_cells(shown, by_rank, dtype)]
        for place, by_rank in rows[:_MOST_ROWS]
    ]
    return table(headers, body, f"{corner.capitalize()}s by rank", numbers=range(1, len(headers)))


def _cells(groups: list[list[str]], by_rank: Mapping[str, Any], dtype: str) -> list[Html]:
    said = [spoken(by_rank[group[0]], dtype) if group[0] in by_rank else "-" for group in groups]
    weights: Counter[str] = Counter()
    for group, value in zip(groups, said, strict=True):
        weights[value] += len(group)
    common, count = weights.most_common(1)[0]
    # Without a majority nobody is called odd.
    majority = 2 * count > sum(weights.values())
    return [
        tag("td", value, class_="number odd" if majority and value != common else "number") for value in said
    ]


def _standings(groups: Sequence[Mapping[str, Any]], odd: Collection[int]) -> Html:
    rows = []
    for group in groups[:_MOST_GROUPS]:
        state = "has left" if group["left"] else "stands still"
        state = f"waits in {group['waits_in']}" if group["waits_in"] and not group["left"] else state
        stack = tag("td", *(tag("code", call, Html("<br>")) for call in group["stack"][:12]))
        rows.append([rank_ranges(group["ranks"]), group["step"], state, stack])
    headers = ("ranks", "step", "state", "stack, the innermost call first")
    return joined([tag("p", "Where they stand:"), table(headers, rows, "Where ranks stand")])


_LAYOUTS: dict[str, Callable[[Any, Collection[int]], Html]] = {
    "groups": _groups,
    "parameters": _parameters,
    "elements": _elements,
    "hyperparameters": _hyperparameters,
    "standings": _standings,
}


# All of them are in report.json; a page of hundreds is read by nobody.
_MOST = 60


def section(made: PageContext) -> Html | None:
    ordered = in_order(made.report)
    if not ordered:
        return tag("p", "None.")
    several = len(made.report.attempts) > 1
    cards = [_card(finding, several, _line(made, finding)) for finding in ordered[:_MOST]]
    left_out = len(ordered) - _MOST
    more = tag("p", f"and {left_out} more, in report.json") if left_out > 0 else None
    return joined([*cards, more])


def _line(made: PageContext, finding: Finding) -> str:
    file, line = script_line(made.report, finding)
    return f"{file}:{line}" if line else ""


def _card(finding: Finding, several_attempts: bool, line: str) -> Html:
    heading = tag(
        "h3", tag("span", f"{finding.severity.value} {finding.code}", class_="badge"), " ", finding.title
    )
    message = tag("p", finding.message) if finding.message != finding.title else None
    advice = [
        joined([tag("dt", label), tag("dd", said)])
        for label, said in (("why", finding.cause), ("fix", finding.fix))
        if said
    ]
    explain = tag("p", "More: ", tag("code", f"ddpcheck explain {finding.code}"), class_="quiet")
    return tag(
        "article",
        heading,
        tag("p", _place(finding, several_attempts, line), class_="quiet"),
        message,
        evidence(finding.evidence, finding.ranks),
        tag("dl", *advice, class_="advice") if advice else None,
        explain,
        class_=f"finding {finding.severity.value}",
    )


def _place(finding: Finding, several_attempts: bool, line: str) -> Html:
    parts: list[object] = []
    if several_attempts:
        parts.append(f"attempt {finding.attempt}")
    if finding.step is not None:
        parts.append(f"step {finding.step}")
    parts += [f"stage {finding.stage}"] if finding.stage else []
    parts += [f"module {finding.module}"] if finding.module else []
    parts += [joined(["parameter ", tag("code", finding.parameter)])] if finding.parameter else []
    parts += [name_ranks(finding.ranks)] if finding.ranks else []
    parts += [joined(["at ", tag("code", line)])] if line else []
    return joined([item for part in parts for item in (", ", part)][1:])
