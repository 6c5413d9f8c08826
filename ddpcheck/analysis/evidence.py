"""Evidence of a disagreement: ranks grouped by digest, and the tensors and elements that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddpcheck.analysis.aggregate.agreement import Disagreement
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.analysis.tensor_values import (
    CapturedTensors,
    differing_elements,
    element_size,
    unravel_index,
    value,
)
from ddpcheck.records.codecs import unpack_leaves, unpack_samples
from ddpcheck.records.kinds.digests import CaptureRecord, DetailRecord, TensorKind

MOST_NAMES = 10
MOST_VALUES = 5
MOST_RANKS = 8

Row = list[Any]  # [name, dtype, shape, trainable]


def tensor_rows(attempt: Attempt, disagreement: Disagreement) -> list[Row]:
    """The tensors of a comparison, in the order of its leaves."""
    rank = attempt.ranks[min(disagreement.digests)]
    record = rank.latest[disagreement.key.module]
    if disagreement.key.of == TensorKind.IGNORED.value:
        return [[name, "", [], 1] for name in record.ignored]
    return record.buffers if disagreement.key.of == TensorKind.BUFFERS.value else record.parameters


def differing_tensors(attempt: Attempt, disagreement: Disagreement) -> list[int]:
    """Indices of the tensors that differ. Uses the leaves of detail records where ranks wrote them."""
    leaves = {rank: _leaves(attempt.ranks[rank], rank, disagreement) for rank in disagreement.digests}
    # For gradients, only ranks that detected the disagreement wrote leaves.
    columns = [column for column in leaves.values() if column]
    if len({len(column) for column in columns}) != 1:
        return []
    return [index for index in range(len(columns[0])) if len({column[index] for column in columns}) > 1]


def _leaves(rank: RankData, number: int, disagreement: Disagreement) -> list[bytes]:
    digest = disagreement.digests[number]
    truncated = unpack_leaves(digest.leaves, digest.width)
    detail = _detail(rank, disagreement)
    if detail is None:
        return truncated
    # Truncate to the same width on all ranks: some may have written full leaves.
    return [leaf[: digest.width] for leaf in unpack_leaves(detail.leaves, detail.width)] or truncated


def _detail(rank: RankData, disagreement: Disagreement) -> DetailRecord | None:
    for module, record in rank.details:
        if module == disagreement.key.module and _matches(record, disagreement):
            return record
    return None


def _matches(record: DetailRecord | CaptureRecord, disagreement: Disagreement, later: bool = False) -> bool:
    """Whether `record` belongs to the same comparison; with `later`, also at another step."""
    key = disagreement.key
    optimizer = -1 if record.optimizer is None else record.optimizer
    same_kind = (record.stage, record.of, optimizer) == (key.stage, key.of, key.optimizer)
    return same_kind and (later or record.step == key.step)


def of_disagreement(attempt: Attempt, disagreement: Disagreement, folder: Path) -> dict[str, Any]:
    """The evidence of a finding about a disagreement."""
    rows = tensor_rows(attempt, disagreement)
    indices = [index for index in differing_tensors(attempt, disagreement) if index < len(rows)]
    evidence: dict[str, Any] = {
        "groups": [{"ranks": list(ranks), "digest": root} for root, ranks in disagreement.groups()],
        "parameters": {
            "count": len(indices),
            "of": len(rows),
            "names": [rows[index][0] for index in indices[:MOST_NAMES]],
        },
    }
    elements = _elements(attempt, disagreement, rows, indices, folder)
    if elements:
        evidence["elements"] = elements
    return evidence


def _elements(
    attempt: Attempt, disagreement: Disagreement, rows: list[Row], indices: list[int], folder: Path
) -> dict[str, Any]:
    """Differing elements of the first tensor of which values of two groups were recorded."""
    ranks = _representatives(disagreement)
    captured = _captured(attempt, disagreement.key.module, ranks, disagreement, folder)
    sampled = _from_samples(attempt, disagreement, rows, indices, ranks)
    if captured is None:
        return sampled
    step, files = captured
    names = [rows[index] for index in indices] or rows
    for name, dtype, shape, _ in names:
        data = {rank: file.read(name) for rank, file in files.items()}
        elements = _compare(data, name, dtype, shape)
        if not elements:
            continue
        elements["step"] = step
        if step != disagreement.key.step and sampled:
            # The values are those of the step itself; the count is that of a later step.
            return {**sampled, "differing": elements["differing"], "counted_at_step": step}
        return elements
    return sampled


def _representatives(disagreement: Disagreement) -> list[int]:
    """One rank of each group first, then further ranks up to the limit."""
    groups = [ranks for _, ranks in disagreement.groups()]
    firsts = [ranks[0] for ranks in groups]
    others = [rank for ranks in groups for rank in ranks[1:]]
    return sorted((firsts + others)[:MOST_RANKS])


def _captured(
    attempt: Attempt, module: ModuleKey, ranks: list[int], disagreement: Disagreement, folder: Path
) -> tuple[int, dict[int, CapturedTensors]] | None:
    """The first step, from the disagreement on, at which ranks of two groups captured their tensors."""
    group_of = {rank: root for root, group in disagreement.groups() for rank in group}
    by_step: dict[int, dict[int, CaptureRecord]] = {}
    for rank in ranks:
        for key, record in attempt.ranks[rank].captures:
            if (
                key == module
                and record.step >= disagreement.key.step
                and _matches(record, disagreement, later=True)
            ):
                by_step.setdefault(record.step, {})[rank] = record
    for step in sorted(by_step):
        if len({group_of[rank] for rank in by_step[step]}) > 1:
            return step, {r: CapturedTensors(folder / record.file) for r, record in by_step[step].items()}
    return None


def _compare(data: dict[int, bytes], name: str, dtype: str, shape: list[int]) -> dict[str, Any]:
    size = element_size(dtype)
    recorded = {rank: part for rank, part in data.items() if part}
    if len(set(recorded.values())) < 2:
        return {}
    first = min(recorded)
    second = next(rank for rank in sorted(recorded) if recorded[rank] != recorded[first])
    count, indices = differing_elements(recorded[first], recorded[second], size, MOST_VALUES)
    total = 1
    for extent in shape:
        total *= extent
    exact = len(recorded[first]) == len(recorded[second]) == total * size
    return {
        "parameter": name,
        "dtype": dtype,
        "shape": shape,
        "differing": count,
        "of": total,
        "exact": exact,
        "values": [
            {
                "index": unravel_index(index, shape),
                "by_rank": {
                    str(r): value(part[index * size : (index + 1) * size], dtype)
                    for r, part in recorded.items()
                    if len(part) >= (index + 1) * size
                },
            }
            for index in indices
        ],
    }


def _from_samples(
    attempt: Attempt, disagreement: Disagreement, rows: list[Row], indices: list[int], ranks: list[int]
) -> dict[str, Any]:
    """Differences within the first values of each tensor, which detail records contain."""
    details = {rank: _detail(attempt.ranks[rank], disagreement) for rank in ranks}
    samples = {rank: unpack_samples(record.samples) for rank, record in details.items() if record is not None}
    for index in indices:
        name, dtype, shape, _ = rows[index]
        data = {rank: parts[index] for rank, parts in samples.items() if index < len(parts)}
        elements = _compare(data, name, dtype, shape)
        if elements:
            return {**elements, "step": disagreement.key.step, "exact": False}
    return {}
