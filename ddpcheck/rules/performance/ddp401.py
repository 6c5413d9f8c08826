"""DDP401: a large part of the step is exposed communication."""

from __future__ import annotations

from statistics import median

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.overlap.model import Overlap
from ddpcheck.rules.rule import Need, Rule, first_sentence

RULE = Rule(
    code="DDP401",
    severity=Severity.WARNING,
    title="Communication is exposed",
    summary="communication is exposed: its share of a step and its cost (`--profile`)",
    needs=(Need.OVERLAP,),
    headline=first_sentence,
    # After warnings that may explain slow communication.
    order=606,
)

# Fewer steps could all be outliers.
_LEAST_STEPS = 3
# Median share of the step.
_LEAST_SHARE = 0.2
# Share and duration in every step. Noise only lengthens a transfer, so the shortest shows best what the link needs.
# Steps of a few milliseconds are mostly overhead.
_LEAST_SHARE_EVER = 0.1
_LEAST_NS_EVER = 5_000_000
_MOST_RANKS = 16


def find(context: RuleContext) -> list[Finding]:
    overlap = context.overlap
    if overlap is None or withheld(context):
        return []
    shares = [step.exposed_transfer_ns / step.took_ns for step in overlap.steps if step.took_ns > 0]
    exposed = median(step.exposed_transfer_ns for step in overlap.steps)
    if len(shares) < _LEAST_STEPS or median(shares) < _LEAST_SHARE or min(shares) < _LEAST_SHARE_EVER:
        return []
    if min(step.exposed_transfer_ns for step in overlap.steps) < _LEAST_NS_EVER:
        return []
    return [_finding(context, overlap, median(shares), exposed)]


def withheld(context: RuleContext) -> str:
    """Why the profiled steps say nothing about the link."""
    overlap = context.overlap
    if overlap is None:
        return ""
    if len(overlap.steps) < _LEAST_STEPS:
        return f"only {len(overlap.steps)} profiled steps could be compared across ranks"
    if overlap.machine_too_busy:
        return "processors oversubscribed: ranks waited for a processor in the profiled steps"
    return ""


def _finding(context: RuleContext, overlap: Overlap, share: float, exposed: float) -> Finding:
    took = median(step.took_ns for step in overlap.steps)
    waited = median(step.exposed_wait_ns for step in overlap.steps)
    cause, fix = _why(overlap)
    return context.finding(
        RULE,
        f"Exposed communication takes {exposed / 1e6:.1f} ms of a {took / 1e6:.1f} ms step ({share:.0%}). Steps "
        f"{overlap.first_step} to {overlap.end_step - 1} were profiled. Without it, a step would be "
        f"{took / max(took - exposed, 1):.2g} times as fast. Waiting for the last rank takes another "
        f"{waited / 1e6:.1f} ms.",
        step=overlap.first_step,
        ranks=tuple(rank.rank for rank in overlap.ranks),
        evidence={
            "step_ms": round(took / 1e6, 3),
            "exposed_transfer_ms": round(exposed / 1e6, 3),
            "exposed_share": round(share, 3),
            "exposed_waiting_ms": round(waited / 1e6, 3),
            "hidden_pct": {str(rank.rank): rank.overlap_pct for rank in overlap.ranks[:_MOST_RANKS]},
            "bytes_a_step": _bytes_a_step(overlap),
            "bus_bandwidth_gbps": _bandwidth(overlap),
        },
        cause=cause,
        fix=fix,
    )


def _why(overlap: Overlap) -> tuple[str, str]:
    """Either there is not enough compute to hide the transfers, or the transfers start too late."""
    steps = len(overlap.steps)
    compute = median(rank.compute_ns for rank in overlap.ranks) / steps
    transfer = (overlap.transfer_ns or 0) / steps
    if transfer > compute:
        return (
            f"transfers take longer than the compute that could hide them: {transfer / 1e6:.1f} ms of transfers and "
            f"{compute / 1e6:.1f} ms of compute per step",
            "Compute more between two reductions (a larger batch per rank, or accumulate gradients under no_sync), "
            "send less (bf16_compress_hook), or use a faster link.",
        )
    return (
        f"there is enough compute ({compute / 1e6:.1f} ms per step for {transfer / 1e6:.1f} ms of transfers), "
        "but transfers start too late to overlap with it",
        "Start the first buckets earlier: set a smaller bucket_cap_mb, or the default if it is larger now, and avoid "
        "large parameters whose gradients are ready last.",
    )


def _bytes_a_step(overlap: Overlap) -> int | None:
    sizes = [each.bytes for each in overlap.buckets]
    if not sizes or any(size is None for size in sizes):
        return None
    return sum(size or 0 for size in sizes) // max(len({each.step for each in overlap.buckets}), 1)


def _bandwidth(overlap: Overlap) -> float | None:
    known = [each.busbw_gbps for each in overlap.buckets if each.busbw_gbps is not None]
    return round(median(known), 3) if known else None
