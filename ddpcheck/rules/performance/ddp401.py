"""DDP401: a good part of the step is communication that nothing hides."""

from __future__ import annotations

from statistics import median

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.overlap.model import Overlap

# Fewer steps could all be odd ones.
LEAST_STEPS = 3
# Of the step, in the middle of all steps.
LEAST_SHARE = 0.2
# In every single one. Noise only adds to a transfer, so the shortest tells best what the link takes; and steps of a
# few milliseconds are mostly overhead, whatever they hide.
LEAST_SHARE_EVER = 0.1
LEAST_NS_EVER = 5_000_000
MOST_TOLD = 16


def find(case: RuleContext) -> list[Finding]:
    seen = case.overlap
    if seen is None or len(seen.steps) < LEAST_STEPS or seen.machine_too_busy:
        return []
    shares = [step.exposed_transfer_ns / step.took_ns for step in seen.steps if step.took_ns > 0]
    exposed = median(step.exposed_transfer_ns for step in seen.steps)
    if len(shares) < LEAST_STEPS or median(shares) < LEAST_SHARE or min(shares) < LEAST_SHARE_EVER:
        return []
    if min(step.exposed_transfer_ns for step in seen.steps) < LEAST_NS_EVER:
        return []
    return [_finding(case, seen, median(shares), exposed)]


def _finding(case: RuleContext, seen: Overlap, share: float, exposed: float) -> Finding:
    took = median(step.took_ns for step in seen.steps)
    waited = median(step.exposed_wait_ns for step in seen.steps)
    cause, fix = _why(seen)
    return case.finding(
        "DDP401",
        f"In steps {seen.first_step} to {seen.end_step - 1} a rank spent {exposed / 1e6:.1f} ms of a step's "
        f"{took / 1e6:.1f} ms ({share:.0%}) in transfers while it computed nothing: without them a step would be "
        f"{took / max(took - exposed, 1):.2g} times as fast. Waiting for the last rank is not in it; that took "
        f"{waited / 1e6:.1f} ms.",
        severity=Severity.WARNING,
        step=seen.first_step,
        ranks=tuple(rank.rank for rank in seen.ranks),
        evidence={
            "step_ms": round(took / 1e6, 3),
            "exposed_transfer_ms": round(exposed / 1e6, 3),
            "exposed_share": round(share, 3),
            "exposed_waiting_ms": round(waited / 1e6, 3),
            "hidden_pct": {str(rank.rank): rank.overlap_pct for rank in seen.ranks[:MOST_TOLD]},
            "bytes_a_step": _bytes_a_step(seen),
            "bus_bandwidth_gbps": _bandwidth(seen),
        },
        cause=cause,
        fix=fix,
    )


def _why(seen: Overlap) -> tuple[str, str]:
    """More to transfer than compute could hide, or enough compute and the transfers come too late for it."""
    steps = len(seen.steps)
    compute = median(rank.compute_ns for rank in seen.ranks) / steps
    transfer = (seen.transfer_ns or 0) / steps
    if transfer > compute:
        return (
            f"there is more to transfer than compute to hide it: {transfer / 1e6:.1f} ms of transfers, "
            f"{compute / 1e6:.1f} ms of compute in a step",
            "Compute more between two reductions (a larger batch a rank, or accumulate gradients under no_sync), "
            "send less (bf16_compress_hook), or use a faster link.",
        )
    return (
        f"there is compute enough ({compute / 1e6:.1f} ms in a step for {transfer / 1e6:.1f} ms of transfers), "
        "but transfers begin too late to run beside it",
        "Let the first buckets go earlier: a smaller bucket_cap_mb, the default bucket_cap_mb where a larger one is "
        "set, and no large parameters whose gradients come last.",
    )


def _bytes_a_step(seen: Overlap) -> int | None:
    sizes = [each.bytes for each in seen.buckets]
    if not sizes or any(size is None for size in sizes):
        return None
    return sum(size or 0 for size in sizes) // max(len({each.step for each in seen.buckets}), 1)


def _bandwidth(seen: Overlap) -> float | None:
    known = [each.busbw_gbps for each in seen.buckets if each.busbw_gbps is not None]
    return round(median(known), 3) if known else None
