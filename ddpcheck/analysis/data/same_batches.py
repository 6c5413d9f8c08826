"""Judges whether equal batches are a mistake, a coincidence, or an input that is meant never to change."""

from __future__ import annotations

from enum import Enum

from ddpcheck.analysis.data.batches import ModuleBatches

# Different values in a batch: with fewer, two batches may well be equal by chance.
PLENTY = 16
FEW = 4
ALONE = 32
# The share of forwards at which ranks must have the same batch, by how much a batch holds.
SHARE_OF_PLENTY = 0.2
SHARE_OF_SOME = 0.5
LEAST = 2


class Sameness(str, Enum):
    """What equal batches come to."""

    NONE = "none"
    CONSTANT = "constant"
    NOW_AND_THEN = "now and then"
    DUPLICATED = "duplicated"


def sameness(seen: ModuleBatches) -> Sameness:
    tally = seen.batches
    if not tally.same:
        return Sameness.NONE
    if seen.forwards == 1:
        return Sameness.DUPLICATED if tally.variety >= ALONE else Sameness.NONE
    # Zeros, ones, the number of the step: inputs that stand for nothing.
    if tally.variety < FEW:
        return Sameness.NONE
    if tally.compared == 1:
        return Sameness.CONSTANT
    plenty = tally.variety >= PLENTY
    share = tally.same / tally.compared
    if tally.same >= LEAST and share >= (SHARE_OF_PLENTY if plenty else SHARE_OF_SOME):
        return Sameness.DUPLICATED
    return Sameness.NOW_AND_THEN if plenty and tally.same >= LEAST else Sameness.NONE
