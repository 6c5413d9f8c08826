"""The evidence of one finding on the terminal, and the gradients that were saved for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable

from ddpcheck.analysis.allreduce.saved_gradients import SavedGradients, SavedParameter, SavedStage
from ddpcheck.formatting import name_ranks
from ddpcheck.reports.safe_text import shortened
from ddpcheck.reports.terminal.console import LABEL, MARK_STYLES, ReportConsole, indented
from ddpcheck.reports.views.evidence import (
    Block,
    Line,
    Names,
    RankValues,
    Records,
    StackGroup,
    Stacks,
    column_label,
    evidence_blocks,
    outlier_flags,
)
from ddpcheck.reports.views.table import CellMark, Table

_SAVED_GRADIENTS_MOST_RANKS = 8
# All parameters of a small model; the first ones of a large model.
_MOST_PARAMETERS = 40


def render_gradients(modules: Sequence[SavedGradients], console: Console) -> None:
    """Write all modules to `console`, parameter by parameter."""
    out = ReportConsole(console)
    for module in modules:
        out.put(out.text(_heading(module), LABEL))
        if module.missing:
            out.put(
                out.text(
                    f"no gradients of {name_ranks(module.missing)} were saved: the mean cannot be checked"
                )
            )
        for parameter in module.parameters[:_MOST_PARAMETERS]:
            out.gap()
            _print_parameter(out, parameter)
        more = len(module.parameters) - _MOST_PARAMETERS
        if more > 0:
            out.gap()
            out.put(out.text(f"and {more} more parameters, in the folder gradients"))


def _heading(module: SavedGradients) -> str:
    of_attempt = f", attempt {module.attempt}" if module.attempts > 1 else ""
    return f"Step {module.step}, module {module.module}{of_attempt}: {_agreement(module)}"


def _agreement(module: SavedGradients) -> str:
    if not any(parameter.reduced for parameter in module.parameters):
        return "no reduced gradients were saved"
    differ = sum(not parameter.reduced_equal for parameter in module.parameters)
    if differ:
        return f"reduced gradients differ in {differ} of {len(module.parameters)} parameters"
    return "reduced gradients are the same on all ranks" + (" that were saved" if module.missing else "")


def _print_parameter(out: ReportConsole, parameter: SavedParameter) -> None:
    shape = "x".join(map(str, parameter.shape)) or "scalar"
    out.put(out.text(f"{parameter.name} ({parameter.dtype} {shape})"))
    rows: list[tuple[str, str, str]] = []
    rows += _rows("weights before", parameter.before)
    rows += _rows("local gradient,", parameter.local, every=True)
    rows += _rows("reduced", parameter.reduced)
    rows += _rows("weights after", parameter.after)
    out.put(out.columns(("", "norm", "first values"), rows), indent=2)
    if parameter.off_mean is not None:
        out.put(out.text(f"reduced differs from the mean by at most {parameter.off_mean:.3g}"), indent=2)


def _rows(label: str, stages: Mapping[int, SavedStage], every: bool = False) -> list[tuple[str, str, str]]:
    """One row if all ranks have equal values, else one for each rank."""
    if not stages:
        return []
    if not every and len(set(stages.values())) == 1:
        return [(f"{label}, all ranks", *_numbers(next(iter(stages.values()))))]
    shown = sorted(stages)[:_SAVED_GRADIENTS_MOST_RANKS]
    rows = [(f"{label} rank {rank}", *_numbers(stages[rank])) for rank in shown]
    if len(stages) > len(shown):
        rows.append((f"and {len(stages) - len(shown)} more ranks", "", ""))
    return rows


def _numbers(stage: SavedStage) -> tuple[str, str]:
    first = "  ".join(f"{x:.6g}" if isinstance(x, (int, float)) else str(x) for x in stage.first)
    return f"{stage.norm:.6g}", first


_INDENT = 6
_MOST_ROWS = 10
_MOST_NAMES = 10
_MOST_GROUPS = 8
_MOST_CHARACTERS = 400
# More columns than this are hard to compare; ranks with equal values then share one.
_MOST_RANKS = 8
# The width of "(1024 more ranks)".
_MORE_RANKS_WIDTH = 18
# Stacks: columns side by side, the least width of one, and the calls shown of each.
_MOST_STACKS = 4
_STACK_WIDTH = 30
_MOST_CALLS = 10
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")


def print_evidence(
    console: ReportConsole, evidence: Mapping[str, Any], indent: int, outliers: Collection[int] = ()
) -> None:
    """One block for each piece of evidence; a blank line before each that is more than a line."""
    after_line = False
    for block in evidence_blocks(evidence, outliers):
        is_line = isinstance(block, Line)
        if not (after_line and is_line):
            console.gap()
        console.put(_rendered(console, block), indent=indent)
        after_line = is_line


def _rendered(console: ReportConsole, block: Block) -> RenderableType:
    if isinstance(block, Line):
        return console.text(shortened(block.text, _MOST_CHARACTERS))
    if isinstance(block, Names):
        return _names(console, block)
    if isinstance(block, Records):
        return _records(console, block)
    if isinstance(block, RankValues):
        return _rank_values(console, block)
    if isinstance(block, Stacks):
        return _stacks(console, block)
    return _table(console, block)


def _names(console: ReportConsole, block: Names) -> RenderableType:
    shown = block.names[:_MOST_NAMES]
    more = block.more + len(block.names) - len(shown)
    names = ", ".join(map(console.line, shown)) + (f" and {more} more" if more else "")
    return Group(console.text(block.heading), indented(console.text(names)))


def _table(console: ReportConsole, table: Table) -> RenderableType:
    blocks: list[RenderableType] = [
        console.text(table.title),
        indented(console.grid(table, table.rows[:_MOST_GROUPS])),
    ]
    if len(table.rows) > _MOST_GROUPS:
        more = sum(len(row.ranks) for row in table.rows[_MOST_GROUPS:])
        text = f"and {more} more ranks in {len(table.rows) - _MOST_GROUPS} more {table.noun}"
        blocks.append(indented(console.text(text)))
    return Group(*blocks)


def _records(console: ReportConsole, block: Records) -> RenderableType:
    """A table where the items are alike and it fits; else one line for each item."""
    table = block.table
    widths = [
        max(len(text) for text in (column.label, *(row.cells[index].text for row in table.rows)))
        for index, column in enumerate(table.columns)
    ]
    fits = sum(widths) + 2 * len(widths) + _INDENT <= console.console.width
    heading = console.text(table.title)
    if block.uniform and fits and len(table.rows) <= _MOST_ROWS:
        return Group(heading, indented(console.grid(table, table.rows)))
    lines = [shortened(line, _MOST_CHARACTERS) for line in block.lines[:_MOST_ROWS]]
    lines += [f"and {len(block.lines) - _MOST_ROWS} more"] if len(block.lines) > _MOST_ROWS else []
    return Group(heading, indented(Group(*map(console.text, lines))))


def _rank_values(console: ReportConsole, block: RankValues) -> RenderableType:
    blocks: list[RenderableType] = [
        console.text(block.heading),
        indented(_side_by_side(console, block)),
    ]
    more = len(block.rows) - _MOST_ROWS
    if more > 0:
        blocks.append(indented(console.text(f"and {more} more")))
    return Group(*blocks)


def _side_by_side(console: ReportConsole, block: RankValues) -> RichTable:
    """One column for each rank, or for each group of ranks with equal values where there is no room."""
    groups = [[rank] for rank in block.ranks]
    if _fitting(console, block, groups) < len(groups):
        groups = block.equal_ranks()
    room = _fitting(console, block, groups)
    more = sum(map(len, groups[room:]))
    headers = [block.corner, *map(column_label, groups[:room]), *([f"({more} more ranks)"] if more else [])]
    rows = []
    for label, by_rank in block.rows[:_MOST_ROWS]:
        texts = [by_rank.get(group[0], "-") for group in groups]
        flags = outlier_flags(groups, texts)
        cells = [
            console.text(text, MARK_STYLES[CellMark.ERROR] if outlier else "")
            for text, outlier in zip(texts, flags, strict=True)
        ]
        rows.append([label, *cells[:room]])
    return console.columns(headers, rows)


def _fitting(console: ReportConsole, block: RankValues, groups: Sequence[Sequence[str]]) -> int:
    """How many columns the console has room for, at least two."""
    rows = block.rows[:_MOST_ROWS]
    left = console.console.width - _INDENT - max(len(block.corner), *(len(label) for label, _ in rows))
    widths = [
        max(len(column_label(group)), *(len(by_rank.get(group[0], "-")) for _, by_rank in rows)) + 2
        for group in groups[:_MOST_RANKS]
    ]
    if sum(widths) > left or len(groups) > _MOST_RANKS:
        left -= _MORE_RANKS_WIDTH
    return max(2, sum(total <= left for total in accumulate(widths)))


def _stacks(console: ReportConsole, block: Stacks) -> RenderableType:
    """One column for each group of ranks, as many side by side as fit."""
    groups = block.groups
    room = max(1, min(_MOST_STACKS, console.console.width // _STACK_WIDTH))
    blocks: list[RenderableType] = [console.text(block.heading)]
    for start in range(0, min(len(groups), 2 * _MOST_STACKS), room):
        shown = groups[start : start + room]
        columns = [_stack_column(group) for group in shown]
        height = max(map(len, columns))
        rows = zip(*(column + [""] * (height - len(column)) for column in columns), strict=True)
        blocks.append(indented(console.columns([name_ranks(group.ranks) for group in shown], rows)))
    more = len(groups) - 2 * _MOST_STACKS
    if more > 0:
        blocks.append(indented(console.text(f"and {more} more stacks, in report.json")))
    return Group(*blocks)


def _stack_column(group: StackGroup) -> list[str]:
    return [f"step {group.step}", group.state, *_calls(group.calls)]


def _calls(calls: Sequence[str]) -> list[str]:
    """The innermost call and those of the user; calls in libraries between them are counted."""
    if not calls:
        return ["no stack was recorded"]
    lines = [_without_folder(calls[0])]
    hidden = 0
    for call in calls[1:]:
        if any(mark in call for mark in _LIBRARIES):
            hidden += 1
            continue
        lines += [f"({hidden} in libraries)"] if hidden else []
        lines.append(_without_folder(call))
        hidden = 0
    more = len(lines) - _MOST_CALLS
    return [*lines[:_MOST_CALLS], f"and {more} more"] if more > 0 else lines


def _without_folder(call: str) -> str:
    """`train.py:41 in main`; report.json has the folder."""
    return call.rpartition("/")[2]
