"""Gathers what shows a disagreement: who stood with whom, which tensors, which elements, their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddpcheck.analysis.aggregate.agreement import Disagreement
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.analysis.tensor_values import CapturedTensors, differing_elements, element_size, index_of, value
from ddpcheck.records.digest_codec import unpack_leaves, unpack_samples
from ddpcheck.records.kinds.digests import CaptureRecord, DetailRecord, TensorKind

MOST_NAMES = 10
MOST_VALUES = 5
MOST_RANKS = 8

Row = list[Any]  # [name, dtype, shape, trainable]


def tensor_rows(attempt: Attempt, found: Disagreement) -> list[Row]:
    """The tensors behind a moment's leaves, in order."""
    rank = attempt.ranks[min(found.digests)]
    record = rank.latest[found.moment.module]
    if found.moment.of == TensorKind.IGNORED.value:
        return [[name, "", [], 1] for name in record.ignored]
    return record.buffers if found.moment.of == TensorKind.BUFFERS.value else record.parameters


def differing_places(attempt: Attempt, found: Disagreement) -> list[int]:
    """Which tensors differ, by their leaves: those of details where ranks wrote them, else the record's."""
    leaves = {rank: _leaves(attempt.ranks[rank], rank, found) for rank in found.digests}
    # Of gradients, only ranks that saw the disagreement themselves wrote leaves.
    columns = [column for column in leaves.values() if column]
    if len({len(column) for column in columns}) != 1:
        return []
    return [place for place in range(len(columns[0])) if len({column[place] for column in columns}) > 1]


def _leaves(rank: RankData, number: int, found: Disagreement) -> list[bytes]:
    sighting = found.digests[number]
    narrow = unpack_leaves(sighting.leaves, sighting.width)
    detail = _detail(rank, found)
    if detail is None:
        return narrow
    # Cut to the same width on all ranks: some may have written whole leaves and others not.
    return [leaf[: sighting.width] for leaf in unpack_leaves(detail.leaves, detail.width)] or narrow


def _detail(rank: RankData, found: Disagreement) -> DetailRecord | None:
    for module, record in rank.details:
        if module == found.moment.module and _same(record, found):
            return record
    return None


def _same(record: DetailRecord | CaptureRecord, found: Disagreement, later: bool = False) -> bool:
    """Whether `record` is of the very moment; `later`: or of the like of it at another step."""
    moment = found.moment
    optimizer = -1 if record.optimizer is None else record.optimizer
    alike = (record.stage, record.of, optimizer) == (moment.stage, moment.of, moment.optimizer)
    return alike and (later or record.step == moment.step)


def of_disagreement(attempt: Attempt, found: Disagreement, folder: Path) -> dict[str, Any]:
    """The evidence of a finding about a disagreement."""
    rows = tensor_rows(attempt, found)
    places = [place for place in differing_places(attempt, found) if place < len(rows)]
    evidence: dict[str, Any] = {
        "groups": [{"ranks": list(ranks), "digest": root} for root, ranks in found.groups()],
        "parameters": {
            "count": len(places),
            "of": len(rows),
            "names": [rows[place][0] for place in places[:MOST_NAMES]],
        },
    }
    elements = _elements(attempt, found, rows, places, folder)
    if elements:
        evidence["elements"] = elements
    return evidence


def _elements(
    attempt: Attempt, found: Disagreement, rows: list[Row], places: list[int], folder: Path
) -> dict[str, Any]:
    """Differing elements of the first tensor for which two sides were kept."""
    ranks = _representatives(found)
    captured = _captured(attempt, found.moment.module, ranks, found, folder)
    sampled = _from_samples(attempt, found, rows, places, ranks)
    if captured is None:
        return sampled
    step, files = captured
    names = [rows[place] for place in places] or rows
    for name, dtype, shape, _ in names:
        data = {rank: file.read(name) for rank, file in files.items()}
        elements = _compare(data, name, dtype, shape)
        if not elements:
            continue
        elements["step"] = step
        if step != found.moment.step and sampled:
            # The values of the very step were kept; only the count is of a later one.
            return {**sampled, "differing": elements["differing"], "counted_at_step": step}
        return elements
    return sampled


def _representatives(found: Disagreement) -> list[int]:
    """One rank of each group first, then others as far as there is room."""
    groups = [ranks for _, ranks in found.groups()]
    firsts = [ranks[0] for ranks in groups]
    others = [rank for ranks in groups for rank in ranks[1:]]
    return sorted((firsts + others)[:MOST_RANKS])


def _captured(
    attempt: Attempt, module: ModuleKey, ranks: list[int], found: Disagreement, folder: Path
) -> tuple[int, dict[int, CapturedTensors]] | None:
    """The earliest step, from the disagreement on, at which ranks of two sides kept their tensors."""
    side = {rank: root for root, group in found.groups() for rank in group}
    by_step: dict[int, dict[int, CaptureRecord]] = {}
    for rank in ranks:
        for key, record in attempt.ranks[rank].captures:
            if key == module and record.step >= found.moment.step and _same(record, found, later=True):
                by_step.setdefault(record.step, {})[rank] = record
    for step in sorted(by_step):
        if len({side[rank] for rank in by_step[step]}) > 1:
            return step, {r: CapturedTensors(folder / record.file) for r, record in by_step[step].items()}
    return None


def _compare(data: dict[int, bytes], name: str, dtype: str, shape: list[int]) -> dict[str, Any]:
    size = element_size(dtype)
    kept = {rank: part for rank, part in data.items() if part}
    if len(set(kept.values())) < 2:
        return {}
    first = min(kept)
    second = next(rank for rank in sorted(kept) if kept[rank] != kept[first])
    count, places = differing_elements(kept[first], kept[second], size, MOST_VALUES)
    total = 1
    for extent in shape:
        total *= extent
    whole = len(kept[first]) == len(kept[second]) == total * size
    return {
        "parameter": name,
        "dtype": dtype,
        "shape": shape,
        "differing": count,
        "of": total,
        "exact": whole,
        "values": [
            {
                "index": index_of(place, shape),
                "by_rank": {
                    str(r): value(part[place * size : (place + 1) * size], dtype)
                    for r, part in kept.items()
                    if len(part) >= (place + 1) * size
                },
            }
            for place in places
        ],
    }


def _from_samples(
    attempt: Attempt, found: Disagreement, rows: list[Row], places: list[int], ranks: list[int]
) -> dict[str, Any]:
    """Only the first values of each tensor were kept: which of those differ at this very step."""
    details = {rank: _detail(attempt.ranks[rank], found) for rank in ranks}
    samples = {rank: unpack_samples(record.samples) for rank, record in details.items() if record is not None}
    for place in places:
        name, dtype, shape, _ = rows[place]
        data = {rank: parts[place] for rank, parts in samples.items() if place < len(parts)}
        elements = _compare(data, name, dtype, shape)
        if elements:
            return {**elements, "step": found.moment.step, "exact": False}
    return {}
