"""Classifies equal batches on several ranks: a mistake, a coincidence, or a constant input."""

from __future__ import annotations

from enum import Enum

from ddpcheck.analysis.data.batches import ModuleBatches

# Distinct values in a batch: with few values, two batches may be equal by chance.
MANY_VALUES = 16
FEW_VALUES = 4
# For a job with a single forward.
SINGLE_FORWARD_VALUES = 32
# The least share of forwards with equal batches, for batches with many values and for others.
LEAST_SHARE_OF_MANY = 0.2
LEAST_SHARE_OF_FEW = 0.5
LEAST_REPEATS = 2


class Sameness(str, Enum):
    """How often ranks had equal batches."""

    NONE = "none"
    CONSTANT = "constant"
    NOW_AND_THEN = "now and then"
    DUPLICATED = "duplicated"


def sameness(module: ModuleBatches) -> Sameness:
    batches = module.batches
    if not batches.same:
        return Sameness.NONE
    if module.forwards == 1:
        return Sameness.DUPLICATED if batches.variety >= SINGLE_FORWARD_VALUES else Sameness.NONE
    # Constant inputs such as zeros, ones or the number of the step.
    if batches.variety < FEW_VALUES:
        return Sameness.NONE
    if batches.compared == 1:
        return Sameness.CONSTANT
    many = batches.variety >= MANY_VALUES
    share = batches.same / batches.compared
    if batches.same >= LEAST_REPEATS and share >= (LEAST_SHARE_OF_MANY if many else LEAST_SHARE_OF_FEW):
        return Sameness.DUPLICATED
    return Sameness.NOW_AND_THEN if many and batches.same >= LEAST_REPEATS else Sameness.NONE
