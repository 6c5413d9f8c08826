"""The evidence of one finding, laid out for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ddpcheck.formatting import name_ranks, rank_ranges
from ddpcheck.reports.safe_text import shortened
from ddpcheck.reports.terminal.console import Ink, indented
from ddpcheck.reports.terminal_standings import standings
from ddpcheck.reports.terminal_values import is_by_rank, side_by_side, spoken, spoken_by_rank

_MOST_GROUPS = 8
_MOST_NAMES = 10
_MOST_ROWS = 10
_MOST_CHARACTERS = 400
# What evidence stands in from the edge.
_INDENT = 6
# Evidence by these names lists ranks.
_RANK_LISTS = ("ranks", "reported")
# Enough of a digest to tell two apart by eye; the whole of it is in report.json.
_DIGEST_CHARACTERS = 16


def put_evidence(ink: Ink, evidence: Mapping[str, Any], indent: int) -> None:
    """One block per piece of evidence, in the order the rule gave them, tables set apart."""
    after_line = False
    for key, value in evidence.items():
        if value is None:
            continue  # says no more than that there is nothing to say
        block = _block(ink, key, value)
        is_line = isinstance(block, Text)
        if not (after_line and is_line):
            ink.gap()
        ink.put(block, indent=indent)
        after_line = is_line


def _block(ink: Ink, key: str, value: Any) -> RenderableType:
    layout = _LAYOUTS.get(key)
    if layout is not None:
        try:
            return layout(ink, value)
        except (KeyError, TypeError, ValueError, AttributeError):
            # Older or newer rules may shape their evidence otherwise; it is still worth showing.
            pass
    return _generic(ink, key, value)


def _generic(ink: Ink, key: str, value: Any) -> RenderableType:
    label = key.replace("_", " ")
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, Mapping) for item in value):
        table = _table(ink, value)
        if table is not None:
            return Group(ink.text(f"{label}:"), indented(table))
        lines = [shortened(_spoken_mapping(item), _MOST_CHARACTERS) for item in value[:_MOST_ROWS]]
        lines += [f"and {len(value) - _MOST_ROWS} more"] if len(value) > _MOST_ROWS else []
        return Group(ink.text(f"{label}:"), indented(Group(*map(ink.text, lines))))
    return ink.text(f"{label}: {shortened(spoken_evidence(key, value), _MOST_CHARACTERS)}")


def _table(ink: Ink, items: Sequence[Mapping[str, Any]]) -> RenderableType | None:
    """Items that all tell the same few plain things, one below the other, where the console has the room."""
    keys = list(items[0])
    plain = all(
        list(item) == keys and all(isinstance(value, (str, int, float)) for value in item.values())
        for item in items
    )
    if not plain or len(items) > _MOST_ROWS:
        return None
    titles = [key.replace("_", " ") for key in keys]
    rows = [[spoken(item[key]) for key in keys] for item in items]
    widths = [max(len(row[place]) for row in (titles, *rows)) for place in range(len(keys))]
    if sum(widths) + 2 * len(widths) + _INDENT > ink.console.width:
        return None
    return ink.columns(titles, rows)


def spoken_evidence(key: str, value: Any) -> str:
    """One piece of evidence in a line."""
    if is_by_rank(value):
        return spoken_by_rank(value)
    if isinstance(value, Mapping):
        return _spoken_mapping(value)
    numbers = isinstance(value, (list, tuple)) and all(type(item) is int for item in value)
    return rank_ranges(value) if numbers and value and key.endswith(_RANK_LISTS) else spoken(value)


def _spoken_mapping(value: Mapping[str, Any]) -> str:
    """`ranks 0-2; digest: 9f2c`: who comes first, if it is there."""
    rest = "; ".join(
        f"{key}: {spoken_evidence(str(key), item)}" for key, item in value.items() if key != "ranks"
    )
    if "ranks" not in value:
        return rest
    return f"{name_ranks(value['ranks'])}; {rest}" if isinstance(value["ranks"], (list, tuple)) else rest


def _groups(ink: Ink, groups: list[Mapping[str, Any]]) -> RenderableType:
    rows = [(name_ranks(group["ranks"]), _digest(group)) for group in groups[:_MOST_GROUPS]]
    if len(groups) > _MOST_GROUPS:
        left_out = sum(len(group["ranks"]) for group in groups[_MOST_GROUPS:])
        rows.append((f"{left_out} more ranks", f"in {len(groups) - _MOST_GROUPS} more groups"))
    return Group(ink.text("who holds the same bits:"), indented(ink.columns(["ranks", "digest"], rows)))


def _digest(group: Mapping[str, Any]) -> str:
    digest = group.get("digest")
    return "not recorded" if digest is None else str(digest)[:_DIGEST_CHARACTERS]


def _parameters(ink: Ink, parameters: Mapping[str, Any]) -> RenderableType:
    if not parameters["count"]:
        return ink.text(f"which of the {parameters['of']} tensors differ was not recorded")
    names = [ink.line(name) for name in parameters["names"][:_MOST_NAMES]]
    left_out = parameters["count"] - len(names)
    more = f" and {left_out} more" if left_out > 0 else ""
    heading = f"{parameters['count']} of {parameters['of']} tensors differ:"
    return Group(ink.text(heading), indented(ink.text(", ".join(names) + more)))


def _elements(ink: Ink, elements: Mapping[str, Any]) -> RenderableType:
    dtype = str(elements.get("dtype") or "")
    heading = ink.text(elements_heading(elements))
    rows = [(_index(value["index"]), value["by_rank"]) for value in elements.get("values") or ()]
    if not rows:
        return heading
    blocks: list[RenderableType] = [
        heading,
        indented(side_by_side(ink, "element", rows[:_MOST_ROWS], dtype)),
    ]
    left_out = len(rows) - _MOST_ROWS
    if left_out > 0:
        blocks.append(indented(ink.text(f"and {left_out} more recorded")))
    return Group(*blocks)


def elements_heading(elements: Mapping[str, Any]) -> str:
    kind = " ".join(
        str(elements[key]) for key in ("dtype", "shape") if elements.get(key) not in (None, "")
    )  # fmt: skip
    described = f" ({kind})" if kind else ""
    # Values may be of the very step and the count of a later one, at which whole tensors were kept.
    counted_at = elements.get("counted_at_step", elements.get("step"))
    at = "" if counted_at is None else f" at step {counted_at}"
    values_at = "" if "counted_at_step" not in elements else f"; their values at step {elements['step']}"
    about = "" if elements.get("exact", True) or values_at else "at least "
    counts = f"{about}{elements['differing']} of {elements['of']} elements differ"
    return f"{counts} in {elements['parameter']}{described}{at}{values_at}:"


def _index(index: Any) -> str:
    return "[" + ", ".join(map(str, index)) + "]" if isinstance(index, (list, tuple)) else str(index)


def _hyperparameters(ink: Ink, values: list[Mapping[str, Any]]) -> RenderableType:
    several = len({value["optimizer"] for value in values}) > 1
    rows = [(_place(value, several), value["by_rank"]) for value in values[:_MOST_ROWS]]
    blocks: list[RenderableType] = [indented(side_by_side(ink, "hyperparameter", rows))]
    if len(values) > _MOST_ROWS:
        blocks.append(indented(ink.text(f"and {len(values) - _MOST_ROWS} more")))
    return Group(ink.text("optimizer settings that differ:"), *blocks)


def _place(value: Mapping[str, Any], several: bool) -> str:
    optimizer = f"optimizer {value['optimizer']}, " if several or value["optimizer"] else ""
    return f"{optimizer}group {value['group']}, {value['name']}"


_LAYOUTS: dict[str, Callable[[Ink, Any], RenderableType]] = {
    "groups": _groups,
    "parameters": _parameters,
    "elements": _elements,
    "hyperparameters": _hyperparameters,
    "standings": standings,
}
