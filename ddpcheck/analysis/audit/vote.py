"""Votes on local gradients: whether several ranks computed the same one, and which rank explains a difference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ddpcheck.records.codecs import Packed, unpack, unpack_leaves
from ddpcheck.records.kinds.audit import AuditRecord, GradientVote

_LEAF = 8
# Roundoff of the floating-point formats in which a module computes.
_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
_LOWEST = 2.0**-3


@dataclass(frozen=True)
class Ballot:
    """One gradient of a micro-batch, by the rank that computed it."""

    voter: int
    # False: the gradient of the training itself.
    replayed: bool
    outputs: str
    leaves: tuple[bytes, ...]
    sketches: str
    environment: str
    deterministic: bool


@dataclass(frozen=True)
class Difference:
    """Two ballots on one micro-batch that do not agree."""

    source: int
    voters: tuple[int, int]
    parameters: tuple[int, ...]
    # Whether the outputs of the forward differed already.
    outputs: bool
    # The largest distance between two gradients over the norm of all of them; None: not finite on one side.
    distance: float | None


@dataclass
class Round:
    """All votes at one step of a module."""

    step: int
    ballots: dict[int, list[Ballot]] = field(default_factory=dict)
    # Reasons why a micro-batch was not handed over or not replayed, values of `AuditSkip`.
    skipped: Counter[str] = field(default_factory=Counter)
    # Pairs of ballots that were compared, by whether they agree; and the differences.
    agreeing: list[tuple[int, int, int]] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def audited(self) -> int:
        """Micro-batches of which there are two ballots."""
        return sum(len(ballots) > 1 for ballots in self.ballots.values())

    def suspects(self) -> tuple[int, ...]:
        """The ranks one of which explains all differences: without its ballots, the others agree. Empty: none does."""
        ranks = {ballot.voter for ballots in self.ballots.values() for ballot in ballots}
        return tuple(
            rank
            for rank in sorted(ranks)
            if all(rank in difference.voters for difference in self.differences)
        )

    def transient(self) -> tuple[int, ...]:
        """The ranks whose own gradients differ from all replays, which agree with each other.

        A minority only, while all others are confirmed: several devices that failed at once.
        """
        outliers = {
            source
            for source, ballots in self.ballots.items()
            if len(ballots) > 2 and any(source == difference.source for difference in self.differences)
        }
        explained = all(
            difference.source in outliers and difference.source in difference.voters
            for difference in self.differences
        )
        confirmed = {source for source, _, _ in self.agreeing} - outliers
        return tuple(sorted(outliers)) if explained and len(outliers) < len(confirmed) else ()

    def witnesses(self, ranks: Iterable[int]) -> int:
        """Pairs of ballots on other micro-batches that agree, and were not cast by these ranks."""
        ranks = set(ranks)
        return sum(source not in ranks and not ranks & {one, other} for source, one, other in self.agreeing)


def count_votes(
    step: int, records: Mapping[int, AuditRecord], dtypes: Sequence[str], numels: Sequence[int]
) -> Round:
    """Compare the gradients that the records of one step hold. `numels`: by parameter."""
    result = Round(step)
    excluded: dict[int, set[int]] = {}
    dtype = _coarsest([*dtypes, *(record.dtype for record in records.values())])
    for rank, record in records.items():
        for position, row in enumerate(record.votes):
            vote = GradientVote.from_row(row)
            if vote is None:
                continue
            if vote.reason:
                # The reason of the source says why there was nothing to replay.
                if not position or not _has_reason(records.get(vote.source)):
                    result.skipped[vote.reason] += 1
                continue
            if not position:
                excluded[rank] = set(record.excluded)
            result.ballots.setdefault(vote.source, []).append(_ballot(rank, bool(position), vote, record))
    for source, ballots in list(result.ballots.items()):
        if source not in excluded:
            # What the rank itself computed is not known.
            del result.ballots[source]
            continue
        for number, one in enumerate(ballots):
            for other in ballots[number + 1 :]:
                difference = _compare(source, one, other, excluded[source], dtype, numels)
                if difference is None:
                    result.agreeing.append((source, one.voter, other.voter))
                else:
                    result.differences.append(difference)
    return result


def _has_reason(record: AuditRecord | None) -> bool:
    vote = GradientVote.from_row(record.votes[0]) if record is not None and record.votes else None
    return vote is not None and bool(vote.reason)


def _ballot(rank: int, replayed: bool, vote: GradientVote, record: AuditRecord) -> Ballot:
    leaves = tuple(unpack_leaves(vote.leaves, _LEAF))
    return Ballot(
        rank, replayed, vote.outputs, leaves, vote.sketches, record.environment, record.deterministic
    )


def _compare(
    source: int, one: Ballot, other: Ballot, excluded: set[int], dtype: str, numels: Sequence[int]
) -> Difference | None:
    """Bit for bit on equal devices with deterministic kernels; within the rounding bound on others."""
    rows = [
        index
        for index, (mine, theirs) in enumerate(zip(one.leaves, other.leaves, strict=False))
        if mine != theirs and index not in excluded
    ]
    exact = one.environment == other.environment and one.deterministic and other.deterministic
    # Values of the last layer change the loss, and the gradient of the outputs that was handed over: no gradient here.
    outputs = exact and one.outputs != other.outputs
    distance: float | None = 0.0
    if rows:
        distance, far = _distances(one.sketches, other.sketches, rows, dtype, numels)
        rows = rows if exact else far
    if not rows and not outputs:
        return None
    return Difference(source, (one.voter, other.voter), tuple(rows), outputs, distance)


def _distances(
    one: str, other: str, rows: Sequence[int], dtype: str, numels: Sequence[int]
) -> tuple[float | None, list[int]]:
    """The largest distance of two gradients over the norm of all, and the rows where rounding does not explain it.

    The roundings of a sum of n terms add up like a random walk, to sqrt(n) roundoffs of the operands; those of layer
    after layer add up at most. Errors are measured by the norm of all gradients: that of a single parameter may be a
    difference of large numbers that cancel, such as of a bias before a normalisation.
    """
    try:
        mine, theirs = unpack(one), unpack(other)
    except ValueError:
        return None, []
    if min(len(mine), len(theirs)) <= max(rows):
        return None, []
    norm = math.sqrt(math.fsum(packed.norm**2 for packed in mine if packed.known))
    terms = math.sqrt(max(numels, default=1))
    bound = _ROUNDOFF.get(dtype, _LOWEST) * len(mine) * terms * norm
    far = []
    largest: float | None = 0.0
    for row in rows:
        distance = _distance(mine[row], theirs[row])
        if distance is None:
            largest = None
        elif largest is not None and norm:
            largest = max(largest, distance / norm)
        if distance is None or distance > bound:
            far.append(row)
    return largest, far


def _distance(mine: Packed, theirs: Packed) -> float | None:
    """A lower estimate of the norm of the difference; None where only one is finite, 0 where neither is."""
    if not mine.known or not theirs.known:
        return 0.0 if mine.known == theirs.known else None
    by_value = abs(mine.value - theirs.value) - mine.error - theirs.error
    by_norm = max(mine.norm_low - theirs.norm, theirs.norm_low - mine.norm)
    return max(0.0, by_value, by_norm)


def _coarsest(dtypes: Iterable[str]) -> str:
    return max(
        (dtype for dtype in dtypes if dtype), key=lambda dtype: _ROUNDOFF.get(dtype, _LOWEST), default=""
    )
