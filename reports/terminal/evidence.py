"""The evidence of one finding, laid out for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ddpcheck.formatting import name_ranks, rank_ranges
from ddpcheck.reports.safe_text import shortened
from ddpcheck.reports.terminal.console import ReportConsole, indented

# More columns than this are no longer "side by side"; equal ranks then share one.
_MOST_RANKS = 8
# What a finding's tables stand in from the edge, and the width of "(1024 more ranks)".
_TERMINAL_VALUES_INDENT = 6
_REMARK = 18
# Digits that tell any two values of a type apart; anything else is written out in full.
_DIGITS = {"float32": 9, "float16": 5, "bfloat16": 4}


Rows = Sequence[tuple[str, Mapping[str, Any]]]


def side_by_side(ink: ReportConsole, corner: str, rows: Rows, dtype: str = "") -> Table:
    """One row per place, one column per rank, or per group of ranks with equal values."""
    rows = [(place, {str(rank): value for rank, value in by_rank.items()}) for place, by_rank in rows]
    ranks = sorted({rank for _, by_rank in rows for rank in by_rank}, key=rank_order)
    groups = [[rank] for rank in ranks]
    if _fitting(ink, corner, rows, groups, dtype) < len(groups):
        groups = equal_ranks(ranks, rows)
    room = _fitting(ink, corner, rows, groups, dtype)
    headers = [corner, *(column_header(group) for group in groups[:room])]
    left_out = sum(map(len, groups[room:]))
    headers += [f"({left_out} more ranks)"] if left_out else []
    return ink.columns(headers, ([place, *_cells(groups[:room], by_rank, dtype)] for place, by_rank in rows))


def _fitting(ink: ReportConsole, corner: str, rows: Rows, groups: list[list[str]], dtype: str) -> int:
    """How many of the columns the console has room for, two at least."""
    left = ink.console.width - _TERMINAL_VALUES_INDENT - max(len(corner), *(len(place) for place, _ in rows))
    widths = [
        max(len(column_header(group)), *(len(_cells([group], by_rank, dtype)[0]) for _, by_rank in rows)) + 2
        for group in groups[:_MOST_RANKS]
    ]
    if sum(widths) > left or len(groups) > _MOST_RANKS:
        left -= _REMARK
    return max(2, sum(total <= left for total in accumulate(widths)))


def spoken_by_rank(by_rank: Mapping[str, Any]) -> str:
    """`ranks 0-2: 120; rank 3: 119`, for values that need no table."""
    groups: dict[str, list[int]] = {}
    for rank, value in by_rank.items():
        groups.setdefault(spoken(value), []).append(int(rank))
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
    parts = [f"{name_ranks(ranks)}: {value}" for value, ranks in ordered[:_MOST_RANKS]]
    left_out = sum(len(ranks) for _, ranks in ordered[_MOST_RANKS:])
    return "; ".join(parts) + (f"; {left_out} more ranks" if left_out else "")


def is_by_rank(value: object) -> bool:
    """Whether `value` maps ranks to something."""
    return isinstance(value, Mapping) and bool(value) and all(str(key).isdecimal() for key in value)


def spoken(value: Any, dtype: str = "") -> str:
    """One value the way people write it."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        digits = _DIGITS.get(dtype.removeprefix("torch."))
        return f"{value:.{digits}g}" if digits else repr(value)
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, str) and item for item in value):
        return ", ".join(value)
    return json.dumps(value, default=str, ensure_ascii=False)


def equal_ranks(ranks: list[str], rows: Rows) -> list[list[str]]:
    """Ranks that have the same in every row, together."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for rank in ranks:
        column = tuple(spoken(by_rank[rank]) if rank in by_rank else "" for _, by_rank in rows)
        groups.setdefault(column, []).append(rank)
    return list(groups.values())


def column_header(group: list[str]) -> str:
    if all(rank.isdecimal() for rank in group):
        return name_ranks(map(int, group)) if len(group) < 3 else f"ranks {rank_ranges(map(int, group))}"
    return ", ".join(group)


def _cells(groups: list[list[str]], by_rank: Mapping[str, Any], dtype: str) -> list[str]:
    return [spoken(by_rank[group[0]], dtype) if group[0] in by_rank else "-" for group in groups]


def rank_order(rank: str) -> tuple[int, str]:
    return (int(rank), "") if rank.isdecimal() else (1 << 62, rank)


_MOST_COLUMNS = 4
_MOST_LINES = 10
# A stack takes about this much to be read.
_LEAST_WIDTH = 30
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")


def standings(ink: ReportConsole, groups: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One column for ranks that stand alike; as many beside each other as the console has room for."""
    room = max(1, min(_MOST_COLUMNS, ink.console.width // _LEAST_WIDTH))
    blocks: list[RenderableType] = [ink.text("where they stand, the innermost call first:")]
    for at in range(0, min(len(groups), 2 * _MOST_COLUMNS), room):
        shown = groups[at : at + room]
        columns = [_column(group) for group in shown]
        height = max(map(len, columns))
        rows = zip(*(column + [""] * (height - len(column)) for column in columns), strict=True)
        blocks.append(indented(ink.columns([name_ranks(group["ranks"]) for group in shown], rows)))
    left_out = len(groups) - 2 * _MOST_COLUMNS
    if left_out > 0:
        blocks.append(indented(ink.text(f"and {left_out} more places, in report.json")))
    return Group(*blocks)


def _column(group: Mapping[str, Any]) -> list[str]:
    if group["left"]:
        state = "has left"
    elif group["waits_in"]:
        state = f"waits in {group['waits_in']}"
    else:
        state = "stands still"
    return [f"step {group['step']}", state, *_lines(group["stack"])]


def _lines(stack: Sequence[str]) -> list[str]:
    """The innermost call and the user's own; what lies in libraries between them is counted."""
    if not stack:
        return ["its stack could not be read"]
    lines = [_short(stack[0])]
    hidden = 0
    for call in stack[1:]:
        if any(mark in call for mark in _LIBRARIES):
            hidden += 1
            continue
        lines += [f"({hidden} in libraries)"] if hidden else []
        lines.append(_short(call))
        hidden = 0
    left_out = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], f"and {left_out} more"] if left_out > 0 else lines


def _short(call: str) -> str:
    """`train.py:41 in main`: the folder is in report.json."""
    return call.rpartition("/")[2]


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


def put_evidence(ink: ReportConsole, evidence: Mapping[str, Any], indent: int) -> None:
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


def _block(ink: ReportConsole, key: str, value: Any) -> RenderableType:
    layout = _LAYOUTS.get(key)
    if layout is not None:
        try:
            return layout(ink, value)
        except (KeyError, TypeError, ValueError, AttributeError):
            # Older or newer rules may shape their evidence otherwise; it is still worth showing.
            pass
    return _generic(ink, key, value)


def _generic(ink: ReportConsole, key: str, value: Any) -> RenderableType:
    label = key.replace("_", " ")
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, Mapping) for item in value):
        table = _table(ink, value)
        if table is not None:
            return Group(ink.text(f"{label}:"), indented(table))
        lines = [shortened(_spoken_mapping(item), _MOST_CHARACTERS) for item in value[:_MOST_ROWS]]
        lines += [f"and {len(value) - _MOST_ROWS} more"] if len(value) > _MOST_ROWS else []
        return Group(ink.text(f"{label}:"), indented(Group(*map(ink.text, lines))))
    return ink.text(f"{label}: {shortened(spoken_evidence(key, value), _MOST_CHARACTERS)}")


def _table(ink: ReportConsole, items: Sequence[Mapping[str, Any]]) -> RenderableType | None:
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


def _groups(ink: ReportConsole, groups: list[Mapping[str, Any]]) -> RenderableType:
    rows = [(name_ranks(group["ranks"]), _digest(group)) for group in groups[:_MOST_GROUPS]]
    if len(groups) > _MOST_GROUPS:
        left_out = sum(len(group["ranks"]) for group in groups[_MOST_GROUPS:])
        rows.append((f"{left_out} more ranks", f"in {len(groups) - _MOST_GROUPS} more groups"))
    return Group(ink.text("who holds the same bits:"), indented(ink.columns(["ranks", "digest"], rows)))


def _digest(group: Mapping[str, Any]) -> str:
    digest = group.get("digest")
    return "not recorded" if digest is None else str(digest)[:_DIGEST_CHARACTERS]


def _parameters(ink: ReportConsole, parameters: Mapping[str, Any]) -> RenderableType:
    if not parameters["count"]:
        return ink.text(f"which of the {parameters['of']} tensors differ was not recorded")
    names = [ink.line(name) for name in parameters["names"][:_MOST_NAMES]]
    left_out = parameters["count"] - len(names)
    more = f" and {left_out} more" if left_out > 0 else ""
    heading = f"{parameters['count']} of {parameters['of']} tensors differ:"
    return Group(ink.text(heading), indented(ink.text(", ".join(names) + more)))


def _elements(ink: ReportConsole, elements: Mapping[str, Any]) -> RenderableType:
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


def _hyperparameters(ink: ReportConsole, values: list[Mapping[str, Any]]) -> RenderableType:
    several = len({value["optimizer"] for value in values}) > 1
    rows = [(_place(value, several), value["by_rank"]) for value in values[:_MOST_ROWS]]
    blocks: list[RenderableType] = [indented(side_by_side(ink, "hyperparameter", rows))]
    if len(values) > _MOST_ROWS:
        blocks.append(indented(ink.text(f"and {len(values) - _MOST_ROWS} more")))
    return Group(ink.text("optimizer settings that differ:"), *blocks)


def _place(value: Mapping[str, Any], several: bool) -> str:
    optimizer = f"optimizer {value['optimizer']}, " if several or value["optimizer"] else ""
    return f"{optimizer}group {value['group']}, {value['name']}"


_LAYOUTS: dict[str, Callable[[ReportConsole, Any], RenderableType]] = {
    "groups": _groups,
    "parameters": _parameters,
    "elements": _elements,
    "hyperparameters": _hyperparameters,
    "standings": standings,
}
