"""DDP404: other sizes of buckets would hide more of the communication."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.overlap.model import BucketAdvice, BucketLayout

# What is not worth an experiment is not worth a note.
LEAST_SHARE = 0.05
LEAST_NS = 1_000_000
_MIB = 1 << 20
_DEFAULT = (1 * _MIB, 25 * _MIB)


def find(case: RuleContext) -> list[Finding]:
    seen = case.overlap
    advice = seen.advice if seen is not None and not seen.machine_too_busy else None
    if advice is None or advice.gain_ns < max(LEAST_NS, LEAST_SHARE * advice.step_ns):
        return []
    return [_finding(case, advice)]


def _finding(case: RuleContext, advice: BucketAdvice) -> Finding:
    module = next(key for key in case.modules() if case.attempt.number(key) == advice.module)
    return case.finding(
        "DDP404",
        f"With {option(advice.best)} a step should take {advice.gain_ns / 1e6:.1f} ms less than its "
        f"{advice.step_ns / 1e6:.1f} ms ({advice.gain_ns / advice.step_ns:.0%}): {_count(advice.best)} instead of "
        f"{advice.now.buckets}. That is a simulation with the times at which gradients were ready and a link of "
        f"{advice.latency_ns / 1e6:.2f} ms and {advice.bandwidth_gbps:.3g} GB/s, fitted to the reductions that were "
        "seen.",
        severity=Severity.NOTE,
        module=module,
        evidence={
            "gain_ms": round(advice.gain_ns / 1e6, 3),
            "step_ms": round(advice.step_ns / 1e6, 3),
            "backward_ms": {
                "measured": round(advice.measured_ns / 1e6, 3),
                "simulated": round(advice.now.backward_ns / 1e6, 3),
                f"with {option(advice.best)}": round(advice.best.backward_ns / 1e6, 3),
            },
            "latency_ms": round(advice.latency_ns / 1e6, 3),
            "bandwidth_gbps": advice.bandwidth_gbps,
        },
        cause=f"{_now(advice.now)}, and their reductions do not fit beside the rest of the backward",
        fix=f"Try {_fix(advice.best)}, and measure: a simulation does not know everything.",
    )


def option(layout: BucketLayout) -> str:
    """The layout as DDP's constructor is told of it."""
    if (layout.first_bytes, layout.cap_bytes) == _DEFAULT:
        return "the default bucket_cap_mb"
    if layout.first_bytes == layout.cap_bytes:
        return f"bucket_cap_mb={layout.cap_bytes / _MIB:g}"
    return f"bucket_cap_mb_list=[{layout.first_bytes / _MIB:g}, {layout.cap_bytes / _MIB:g}]"


def _fix(layout: BucketLayout) -> str:
    if option(layout).startswith("bucket_cap_mb_list"):
        return f"DistributedDataParallel(model, {option(layout)}), which newer versions of torch have"
    if option(layout).startswith("the"):
        return "DistributedDataParallel(model) without bucket_cap_mb"
    return f"DistributedDataParallel(model, {option(layout)})"


def _now(layout: BucketLayout) -> str:
    return f"gradients go in {_count(layout)}"


def _count(layout: BucketLayout) -> str:
    return "1 bucket" if layout.buckets == 1 else f"{layout.buckets} buckets"
