"""Evidence of a disagreement: ranks grouped by digest, and the tensors and elements that differ."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from ddpcheck.analysis.aggregate.agreement import Disagreement
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
from ddpcheck.records.codecs import unpack_leaves, unpack_samples
from ddpcheck.records.kinds.digests import CaptureRecord, DetailRecord, TensorKind

LARGEST_HEADER = 64 << 20


class CapturedTensors:
    """One file of captured tensors in safetensors format. A damaged or missing file is empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header: dict[str, Any] = {}
        self._data_offset = 0
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                if size <= LARGEST_HEADER:
                    header = json.loads(file.read(size))
                    self._header = header if isinstance(header, dict) else {}
                    self._data_offset = 8 + size
        except (OSError, ValueError, struct.error):
            self._header = {}

    def names(self) -> set[str]:
        return set(self._header)

    def note(self, name: str) -> str:
        """An entry of the metadata."""
        notes = self._header.get("__metadata__")
        return str(notes.get(name, "")) if isinstance(notes, dict) else ""

    def entries(self) -> list[tuple[str, str, list[int]]]:
        """Name, dtype as safetensors names it, and shape of every tensor."""
        entries = []
        for name, entry in self._header.items():
            match entry:
                case {"dtype": str(dtype), "shape": list(shape)} if all(isinstance(n, int) for n in shape):
                    entries.append((name, dtype, shape))
        return entries

    def read(self, name: str) -> bytes:
        """The raw bytes of a tensor in row-major order; empty where the file does not contain it."""
        match self._header.get(name):
            case {"data_offsets": [int(start), int(end)]} if 0 <= start <= end:
                with self._path.open("rb") as file:
                    # The offsets of a damaged header may exceed the file.
                    size = max(file.seek(0, 2) - self._data_offset, 0)
                    start, end = min(start, size), min(end, size)
                    file.seek(self._data_offset + start)
                    return file.read(end - start)
        return b""


# By torch's name of a dtype: the format character of struct, and the size of an element.
_FORMATS = {
    "float64": ("d", 8),
    "float32": ("f", 4),
    "float16": ("e", 2),
    "int64": ("q", 8),
    "int32": ("i", 4),
    "int16": ("h", 2),
    "int8": ("b", 1),
    "uint8": ("B", 1),
    "bool": ("?", 1),
}
_SIZES = {"bfloat16": 2, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1}


def element_size(dtype: str) -> int:
    """Bytes of one element; 1 for an unknown dtype, which is then compared byte by byte."""
    return _FORMATS[dtype][1] if dtype in _FORMATS else _SIZES.get(dtype, 1)


def value(data: bytes, dtype: str) -> Any:
    """One element as a number; as hexadecimal text where Python has no equivalent of its dtype."""
    if dtype in _FORMATS and len(data) == _FORMATS[dtype][1]:
        return struct.unpack("<" + _FORMATS[dtype][0], data)[0]
    if dtype == "bfloat16" and len(data) == 2:
        return struct.unpack("<f", b"\0\0" + data)[0]
    if dtype == "complex64" and len(data) == 8:
        return str(complex(*struct.unpack("<ff", data)))
    if dtype == "complex128" and len(data) == 16:
        return str(complex(*struct.unpack("<dd", data)))
    return "0x" + data[::-1].hex()


def differing_elements(first: bytes, second: bytes, size: int, most: int) -> tuple[int, list[int]]:
    """The number of differing elements of two tensors, and the flat indices of the first `most`."""
    count = 0
    indices: list[int] = []
    length = min(len(first), len(second))
    # Compare large blocks first: most are equal.
    block = 4096 * size
    for start in range(0, length, block):
        end = min(start + block, length)
        a, b = first[start:end], second[start:end]
        if a == b:
            continue
        for offset in range(0, len(a), size):
            if a[offset : offset + size] != b[offset : offset + size]:
                count += 1
                if len(indices) < most:
                    indices.append((start + offset) // size)
    return count, indices


def unravel_index(flat: int, shape: list[int]) -> list[int]:
    """The index in each dimension of the element at a flat index in row-major order."""
    index: list[int] = []
    for extent in reversed(shape):
        index.append(flat % extent if extent else 0)
        flat //= extent or 1
    return index[::-1]


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
