"""The evidence of a finding as blocks: lines, names, values by rank, tables and stacks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpcheck.formatting import name_ranks, rank_ranges
from ddpcheck.reports.views.table import Cell, CellMark, Column, Table, row

# Groups that a line of values by rank lists.
_MOST_GROUPS = 8
# Evidence with these names lists ranks.
_RANK_LISTS = ("ranks", "reported")
# Enough of a digest to compare by eye; report.json has all of it.
_DIGEST_CHARACTERS = 16
# Digits that distinguish any two values of a type; values of other types are written out in full.
_DIGITS = {"float32": 9, "float16": 5, "bfloat16": 4}


@dataclass(frozen=True)
class Line:
    """One line of text."""

    text: str


@dataclass(frozen=True)
class Names:
    """A list of names, of which `more` are not recorded."""

    heading: str
    names: tuple[str, ...]
    more: int


@dataclass(frozen=True)
class Records:
    """Items of similar shape: as a table, and as one line for each."""

    table: Table
    lines: tuple[str, ...]
    # Whether all items have the same keys and plain values.
    uniform: bool


@dataclass(frozen=True)
class RankValues:
    """Values side by side: one row for each label, one column for each rank."""

    heading: str
    corner: str
    rows: tuple[tuple[str, Mapping[str, str]], ...]

    @property
    def ranks(self) -> list[str]:
        return sorted({rank for _, by_rank in self.rows for rank in by_rank}, key=_rank_order)

    def equal_ranks(self) -> list[list[str]]:
        """Ranks with equal values in every row, together."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for rank in self.ranks:
            groups.setdefault(tuple(by_rank.get(rank, "") for _, by_rank in self.rows), []).append(rank)
        return list(groups.values())


@dataclass(frozen=True)
class StackGroup:
    """Ranks with the same stack."""

    ranks: tuple[int, ...]
    step: object
    state: str
    calls: tuple[str, ...]


@dataclass(frozen=True)
class Stacks:
    """Where ranks are, the innermost call first."""

    heading: str
    groups: tuple[StackGroup, ...]


Block = Line | Names | Records | RankValues | Table | Stacks


def evidence_blocks(evidence: Mapping[str, Any], outliers: Collection[int] = ()) -> list[Block]:
    """One block for each piece of evidence, in the order of the rule; None values are left out."""
    return [_block(key, value, outliers) for key, value in evidence.items() if value is not None]


def _block(key: str, value: Any, outliers: Collection[int]) -> Block:
    layout = _LAYOUTS.get(key)
    if layout is not None:
        try:
            return layout(value, outliers)
        except (KeyError, TypeError, ValueError, AttributeError):
            # Rules of another version may give evidence of another shape; it is still shown.
            pass
    label = key.replace("_", " ")
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, Mapping) for item in value):
        return _records(label, value)
    return Line(f"{label}: {evidence_text(key, value)}")


def _records(label: str, items: Sequence[Mapping[str, Any]]) -> Records:
    keys = list(dict.fromkeys(str(key) for item in items for key in item))
    uniform = all(
        list(item) == keys and all(isinstance(value, (str, int, float)) for value in item.values())
        for item in items
    )
    rows = tuple(
        row([evidence_text(key, item[key]) if key in item else "" for key in keys]) for item in items
    )
    columns = tuple(Column(key.replace("_", " ")) for key in keys)
    return Records(Table(f"{label}:", columns, rows), tuple(map(_mapping_text, items)), uniform)


def evidence_text(key: str, value: Any) -> str:
    """One piece of evidence in a line."""
    if isinstance(value, Mapping) and value and all(str(rank).isdecimal() for rank in value):
        return by_rank_text(value)
    if isinstance(value, Mapping):
        return _mapping_text(value)
    integers = isinstance(value, (list, tuple)) and all(type(item) is int for item in value)
    return rank_ranges(value) if integers and value and key.endswith(_RANK_LISTS) else value_text(value)


def by_rank_text(by_rank: Mapping[str, Any]) -> str:
    """`ranks 0-2: 120; rank 3: 119`."""
    groups: dict[str, list[int]] = {}
    for rank, value in by_rank.items():
        groups.setdefault(value_text(value), []).append(int(rank))
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
    parts = [f"{name_ranks(ranks)}: {value}" for value, ranks in ordered[:_MOST_GROUPS]]
    more = sum(len(ranks) for _, ranks in ordered[_MOST_GROUPS:])
    return "; ".join(parts) + (f"; {more} more ranks" if more else "")


def value_text(value: Any, dtype: str = "") -> str:
    """One value, with the digits that its type needs."""
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


def column_label(group: Sequence[str]) -> str:
    """The header of the column of these ranks."""
    if all(rank.isdecimal() for rank in group):
        return name_ranks(map(int, group)) if len(group) < 3 else f"ranks {rank_ranges(map(int, group))}"
    return ", ".join(group)


def outlier_flags(groups: Sequence[Sequence[str]], texts: Sequence[str]) -> list[bool]:
    """For each column, whether its value differs from that of the majority of ranks; without one, no column is."""
    weights: Counter[str] = Counter()
    for group, text in zip(groups, texts, strict=True):
        weights[text] += len(group)
    if not weights:
        return []
    common, count = weights.most_common(1)[0]
    majority = 2 * count > sum(weights.values())
    return [majority and text != common for text in texts]


def _mapping_text(value: Mapping[str, Any]) -> str:
    """`ranks 0-2; digest: 9f2c`, ranks first."""
    rest = "; ".join(
        f"{key}: {evidence_text(str(key), item)}" for key, item in value.items() if key != "ranks"
    )
    if "ranks" not in value:
        return rest
    return f"{name_ranks(value['ranks'])}; {rest}" if isinstance(value["ranks"], (list, tuple)) else rest


def _rank_order(rank: str) -> tuple[int, str]:
    return (int(rank), "") if rank.isdecimal() else (1 << 62, rank)


def _groups(groups: Sequence[Mapping[str, Any]], outliers: Collection[int]) -> Table:
    rows = []
    for group in groups:
        digest = group.get("digest")
        mark = CellMark.ERROR if set(group["ranks"]) <= set(outliers) else None
        text = "not recorded" if digest is None else str(digest)[:_DIGEST_CHARACTERS]
        rows.append(row([name_ranks(group["ranks"]), Cell(text, mark)], ranks=group["ranks"]))
    columns = (Column("ranks"), Column("digest", code=True))
    return Table("Ranks grouped by identical weights:", columns, tuple(rows), noun="groups")


def _parameters(parameters: Mapping[str, Any], outliers: Collection[int]) -> Block:
    if not parameters["count"]:
        return Line(f"{parameters['of']} tensors were compared; which of them differ was not recorded")
    names = tuple(map(str, parameters["names"]))
    heading = f"{parameters['count']} of {parameters['of']} tensors differ:"
    return Names(heading, names, max(0, parameters["count"] - len(names)))


def _elements(elements: Mapping[str, Any], outliers: Collection[int]) -> Block:
    dtype = str(elements.get("dtype") or "")
    heading = elements_heading(elements)
    rows = [(_index(value["index"]), value["by_rank"]) for value in elements.get("values") or ()]
    return _rank_values(heading, "element", rows, dtype) if rows else Line(heading)


def elements_heading(elements: Mapping[str, Any]) -> str:
    kind = " ".join(
        str(elements[key]) for key in ("dtype", "shape") if elements.get(key) not in (None, "")
    )  # fmt: skip
    described = f" ({kind})" if kind else ""
    # The values may be of the step itself and the count of a later one, at which whole tensors were saved.
    counted_at = elements.get("counted_at_step", elements.get("step"))
    at = "" if counted_at is None else f" at step {counted_at}"
    values_at = "" if "counted_at_step" not in elements else f"; values at step {elements['step']}"
    bound = "" if elements.get("exact", True) or values_at else "at least "
    counts = f"{bound}{elements['differing']} of {elements['of']} elements differ"
    return f"{counts} in {elements['parameter']}{described}{at}{values_at}:"


def _index(index: Any) -> str:
    return "[" + ", ".join(map(str, index)) + "]" if isinstance(index, (list, tuple)) else str(index)


def _hyperparameters(values: Sequence[Mapping[str, Any]], outliers: Collection[int]) -> RankValues:
    several = len({value["optimizer"] for value in values}) > 1
    rows = [(_hyperparameter(value, several), value["by_rank"]) for value in values]
    return _rank_values("Optimizer settings that differ:", "setting", rows)


def _hyperparameter(value: Mapping[str, Any], several: bool) -> str:
    optimizer = f"optimizer {value['optimizer']}, " if several or value["optimizer"] else ""
    return f"{optimizer}group {value['group']}, {value['name']}"


def _rank_values(
    heading: str, corner: str, rows: Iterable[tuple[str, Mapping[Any, Any]]], dtype: str = ""
) -> RankValues:
    return RankValues(
        heading,
        corner,
        tuple(
            (label, {str(rank): value_text(value, dtype) for rank, value in by_rank.items()})
            for label, by_rank in rows
        ),
    )


def _stacks(groups: Sequence[Mapping[str, Any]], outliers: Collection[int]) -> Stacks:
    return Stacks(
        "Stacks, innermost call first:",
        tuple(
            StackGroup(tuple(group["ranks"]), group["step"], _state(group), tuple(group["stack"]))
            for group in groups
        ),
    )


def _state(group: Mapping[str, Any]) -> str:
    if group["left"]:
        return "has exited"
    return f"waits in {group['waits_in']}" if group["waits_in"] else "makes no progress"


_LAYOUTS: dict[str, Callable[[Any, Collection[int]], Block]] = {
    "groups": _groups,
    "parameters": _parameters,
    "elements": _elements,
    "hyperparameters": _hyperparameters,
    "standings": _stacks,
}
