"""Where ranks are on the device mesh that distributes the parameters of a module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey, is_sharded
from ddpcheck.analysis.finding import Finding
from ddpcheck.formatting import name_ranks

# Key of the evidence with the coordinates of ranks.
MESH = "mesh"
_MOST_IN_TEXT = 4


def coordinates_of(attempt: Attempt, module: ModuleKey, ranks: Iterable[int]) -> dict[int, dict[str, int]]:
    """By rank, its coordinate in each dimension of the mesh; empty for a module that is not sharded."""
    mesh: dict[str, Any] = next((rank.latest[module].mesh for rank in attempt.of_module(module).values()), {})
    dims, known = mesh.get("dims", []), mesh.get("coordinates", {})
    return {rank: dict(zip(dims, known[str(rank)], strict=False)) for rank in ranks if str(rank) in known}


def coordinates_text(coordinates: dict[int, dict[str, int]]) -> str:
    """`On the mesh: rank 1 at replicas 0, shards 1; rank 3 at replicas 1, shards 1.`"""
    if not coordinates:
        return ""
    shown = sorted(coordinates)[:_MOST_IN_TEXT]
    texts = [
        f"rank {rank} at " + ", ".join(f"{dim} {number}" for dim, number in coordinates[rank].items())
        for rank in shown
    ]
    more = f"; and {len(coordinates) - len(shown)} more" if len(coordinates) > len(shown) else ""
    return f"On the mesh: {'; '.join(texts)}{more}."


def merge_shards(findings: list[Finding]) -> list[Finding]:
    """One finding where the same happened to several sets of shards: a large mesh has one for each coordinate."""
    merged: dict[tuple[object, ...], list[Finding]] = {}
    for number, finding in enumerate(findings):
        same = (finding.code, finding.severity, finding.step, finding.stage, finding.cause)
        merged.setdefault(same if MESH in finding.evidence else (number,), []).append(finding)
    return [_merge(group) for group in merged.values()]


def _merge(group: list[Finding]) -> Finding:
    first, *others = group
    if not others:
        return first
    ranks = tuple(sorted({rank for finding in group for rank in finding.ranks}))
    also = tuple(sorted({rank for finding in others for rank in finding.ranks} - set(first.ranks)))
    more = "another set" if len(others) == 1 else f"{len(others)} more sets"
    return replace(
        first,
        message=f"{first.message} The same holds for {more} of shards ({name_ranks(also)}).",
        ranks=ranks,
        evidence={
            **first.evidence,
            MESH: {rank: row for finding in group for rank, row in finding.evidence[MESH].items()},
        },
    )


def parameters_of(attempt: Attempt, modules: Iterable[ModuleKey]) -> int:
    """How many parameters the modules have. The shards of all mesh coordinates are parts of the same ones."""
    total, shards = 0, Counter[int]()
    for module in modules:
        counts = {
            number: len(rank.latest[module].parameters) for number, rank in attempt.of_module(module).items()
        }
        if is_sharded(module):
            shards.update(counts)
        else:
            total += max(counts.values(), default=0)
    return total + max(shards.values(), default=0)
