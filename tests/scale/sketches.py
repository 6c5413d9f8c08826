"""Sketches for any number of ranks, whose mean is the sketch of the reduced gradient, as with DDP."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddpcheck.records.codecs import OF_CODE, unwrap

Array = np.ndarray[Any, Any]
_ALPHABET = np.frombuffer(
    bytes(base64.b85encode(number.to_bytes(4, "big"))[4] for number in range(85)), dtype=np.uint8
)
_UNITS = np.array([code.unit for code in OF_CODE])


@dataclass(frozen=True)
class Sketches:
    """Codes of norms and quantised values; one row per rank, one column per parameter."""

    codes: Array
    steps: Array

    @classmethod
    def read(cls, text: str) -> Sketches:
        items = np.frombuffer(unwrap(text), dtype=np.dtype([("code", "u1"), ("steps", "<i4")]))
        return cls(items["code"].copy(), items["steps"].copy())

    def texts(self) -> list[str]:
        """The encoded text of each row, as in records."""
        rows, columns = self.codes.shape
        items = np.zeros((rows, columns), dtype=np.dtype([("code", "u1"), ("steps", "<i4")]))
        items["code"], items["steps"] = self.codes, self.steps
        return _encode(items.view(np.uint8).reshape(rows, 5 * columns))


def spread(seed: list[Sketches], ranks: int, draw: np.random.Generator) -> Sketches:
    """Sketches of `ranks` ranks: those of the seed in turn, each scaled down randomly."""
    turn = np.arange(ranks) % len(seed)
    codes = np.stack([one.codes for one in seed])[turn]
    steps = np.stack([one.steps for one in seed])[turn]
    return Sketches(codes, np.rint(steps * draw.uniform(0.8, 1.0, steps.shape)).astype(np.int32))


def mean_of(local: Sketches, codes: Array) -> Sketches:
    """The sketch of the mean; `codes` are the codes of its norms."""
    mean = (local.steps * _UNITS[local.codes]).mean(axis=0)
    units = _UNITS[codes]
    steps = np.divide(mean, units, out=np.zeros_like(mean), where=units > 0)
    return Sketches(codes, np.rint(steps).astype(np.int32))


def _encode(data: Array) -> list[str]:
    """Base 85 of all rows at once."""
    missing = -data.shape[1] % 4
    padded = np.pad(data, ((0, 0), (0, missing)))
    words = np.ascontiguousarray(padded).view(">u4").astype(np.uint64)
    digits = np.stack([words // 85**power % 85 for power in (4, 3, 2, 1, 0)], axis=-1)
    letters = _ALPHABET[digits.reshape(len(data), -1)]
    kept = letters.shape[1] - missing
    return [bytes(row[:kept]).decode() for row in letters]
