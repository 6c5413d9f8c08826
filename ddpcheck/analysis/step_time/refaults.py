"""Whether a job takes memory from the system in each step and gives it back: page faults that need not be."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.analysis.timing.model import RankTime, Refaults

# Of a step, in the kernel: what a job does not notice is not worth a word.
LEAST_SHARE = 0.15
# A page is found, cleared and mapped in less, also on a virtual machine.
MOST_US_A_FAULT = 10
# What has glibc keep its memory: in the environment of the ranks.
KEEPS_MEMORY = "MALLOC_TRIM_THRESHOLD_=8589934592 MALLOC_MMAP_THRESHOLD_=33554432"


def may_be_faults(kernel_us: float, faults: float) -> bool:
    """Whether so many page faults can be what the kernel was busy with, and not reading or sending."""
    return faults * MOST_US_A_FAULT >= kernel_us


def refaults_in(ranks: Sequence[RankTime]) -> Refaults | None:
    """Of the rank that loses most to them; None where none loses much."""
    found = [each for row in ranks if (each := _of_rank(row)) is not None]
    return max(found, key=lambda each: each.share, default=None)


def _of_rank(row: RankTime) -> Refaults | None:
    if row.kernel_us is None or row.faults is None or not row.step.mean_us:
        return None
    share = row.kernel_us / row.step.mean_us
    if share < LEAST_SHARE or not may_be_faults(row.kernel_us, row.faults):
        return None
    return Refaults(row.rank, row.faults, round(share, 4))
