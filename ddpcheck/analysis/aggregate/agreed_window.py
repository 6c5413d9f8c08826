"""Compares the digests of a window of steps. Where all ranks agree, no record is made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, cast

import numpy as np

from ddpcheck.analysis.aggregate.agreement import Agreement, ComparisonKey
from ddpcheck.analysis.aggregate.step_columns import Stream, equal_on_all_ranks
from ddpcheck.analysis.aggregate.step_window import Window
from ddpcheck.records.kinds.digests import DigestRecord, Stage
from ddpcheck.records.kinds.gradients import AppliedRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Of consecutive steps at which parameters differ, so many at each end are added one by one.
_AT_ENDS = 2
_FEWEST_SKIPPED = 8


def add_window(agreement: Agreement, window: Window) -> None:
    """Add the applied gradients and the digests of a window."""
    streams = [*window.of(AppliedRecord), *window.of(DigestRecord)]
    for module in sorted({stream.module for stream in streams}):
        own = [stream for stream in streams if stream.module == module]
        params = [stream for stream in own if _is_params(stream)]
        if len(params) > 1 or not all(_is_comparable(agreement, stream) for stream in own):
            _add_singly(agreement, own)
            continue
        agreed = [_agreed_rows(stream) for stream in own]
        if all(rows.all() for rows in agreed) and agreement.is_undisturbed(module):
            for stream in own:
                _add_agreed(agreement, stream)
        elif params and all(
            rows.all() or _is_params(stream) for stream, rows in zip(own, agreed, strict=True)
        ):
            _add_runs(agreement, own, params[0], agreed[own.index(params[0])])
        else:
            _add_singly(agreement, own)


def _is_params(stream: Stream) -> bool:
    return stream.record is DigestRecord and stream.constants["stage"] == Stage.PARAMS.value


def _is_comparable(agreement: Agreement, stream: Stream) -> bool:
    """Whether all ranks wrote digests of the same steps, and all else is equal on them."""
    numbers = [rank.number for rank in stream.ranks]
    if len({agreement.hashes.get(number) for number in numbers}) > 1 or agreement.ended.intersection(numbers):
        return False
    fields = ("step", "forward", "hyper") if _is_params(stream) else ("step",)
    return all(map(stream.is_equal_on_all_ranks, fields))


def _agreed_rows(stream: Stream) -> NDArray[np.bool_]:
    roots = stream.texts("root")
    return np.zeros(len(stream), bool) if roots is None else equal_on_all_ranks(roots)


def _add_runs(
    agreement: Agreement, streams: Sequence[Stream], params: Stream, agreed: NDArray[np.bool_]
) -> None:
    """Only the parameters differ, and not at all steps: add consecutive steps of one kind at once."""
    changes = [0, *(np.flatnonzero(agreed[1:] != agreed[:-1]) + 1).tolist(), len(agreed)]
    for begin, end in pairwise(changes):
        first, last = int(params.steps[begin]), int(params.steps[end - 1])
        if end == len(agreed):
            last = max(int(stream.steps[-1]) for stream in streams)
        parts = [_between(stream, first if begin else -1, last) for stream in streams]
        parts = [part for part in parts if len(part)]
        if agreed[begin] and agreement.is_undisturbed(params.module):
            for part in parts:
                _add_agreed(agreement, part)
        elif agreed[begin] or end - begin < _FEWEST_SKIPPED:
            _add_singly(agreement, parts)
        else:
            _add_different(agreement, parts, params.part(begin, end))


def _between(stream: Stream, first: int, last: int) -> Stream:
    begin, end = np.searchsorted(stream.steps, first), np.searchsorted(stream.steps, last, "right")
    return stream.part(int(begin), int(end))


def _add_different(agreement: Agreement, streams: Sequence[Stream], params: Stream) -> None:
    """Steps at which parameters differ: the first and last ones one by one, those between them at once."""
    roots = params.texts("root")
    outliers = None if roots is None else _outliers(roots)
    head, tail = _AT_ENDS, len(params) - _AT_ENDS
    first, last = int(params.steps[head]), int(params.steps[tail])
    _add_singly(agreement, [_between(stream, -1, first - 1) for stream in streams])
    if outliers is None or not agreement.can_skip(params.module):
        _add_singly(agreement, [_between(stream, first, 1 << 62) for stream in streams])
        return
    for stream in streams:
        if not _is_params(stream):
            between = _between(stream, first, last - 1)
            if len(between):
                _add_agreed(agreement, between)
    # What becomes of a difference is known at the next step: the first of the last steps decides the step before.
    _add_singly(agreement, [_between(stream, last, last) for stream in streams])
    middle = params.part(head, tail)
    others = [index for index in range(len(params.ranks)) if index not in outliers]
    named = [others[0], *outliers]

    def digests(row: int) -> list[DigestRecord]:
        return [cast("DigestRecord", middle.record_at(index, row)) for index in named]

    steps = middle.steps.tolist()
    optimizer = params.constants["optimizer"]
    number = -1 if optimizer is None else optimizer
    key = ComparisonKey(params.module, Stage.PARAMS.value, params.constants["of"], steps[0], number)
    ranks = tuple(sorted(params.ranks[index].number for index in outliers))
    agreement.add_different(key, steps, ranks, digests)
    _add_singly(agreement, [_between(stream, last + 1, 1 << 62) for stream in streams])


def _outliers(roots: NDArray[np.uint8]) -> tuple[int, ...] | None:
    """Positions of the ranks outside a majority that is the same in all rows; None if there is none."""
    ranks = len(roots)
    _, groups, counts = np.unique(roots[:, 0], axis=0, return_inverse=True, return_counts=True)
    groups = groups.ravel()
    if 2 * counts.max() <= ranks:
        return None
    reference = int(np.flatnonzero(groups == counts.argmax())[0])
    same = (roots == roots[reference]).all(axis=2)
    if not (same == same[:, :1]).all():
        return None
    return tuple(np.flatnonzero(~same[:, 0]).tolist())


def _add_agreed(agreement: Agreement, stream: Stream) -> None:
    steps = _own_steps(stream)
    last = {
        rank.number: cast("DigestRecord | AppliedRecord", stream.last_of(index))
        for index, rank in enumerate(stream.ranks)
    }
    agreement.add_agreed(stream.module, steps, last)


def _own_steps(stream: Stream) -> list[int]:
    """The steps as the records state them, on which all ranks agree."""
    steps: list[int] = stream.integers("step")[0].tolist()
    return steps


def _add_singly(agreement: Agreement, streams: Sequence[Stream]) -> None:
    """In the order of steps: gradients and parameters of a step belong together."""
    rows = [
        (int(step), number, row)
        for number, stream in enumerate(streams)
        for row, step in enumerate(stream.steps)
    ]
    for (_, number), group in groupby(sorted(rows), key=lambda row: row[:2]):
        stream = streams[number]
        for _, _, row in group:
            for index, rank in enumerate(stream.ranks):
                record = cast("DigestRecord | AppliedRecord", stream.record_at(index, row))
                agreement.add(rank.number, stream.module, record)
