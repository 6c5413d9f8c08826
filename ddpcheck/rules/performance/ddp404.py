"""DDP404: another bucket size would hide more communication."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.overlap.model import BucketAdvice, BucketLayout
from ddpcheck.rules.rule import Need, Rule

RULE = Rule(
    code="DDP404",
    severity=Severity.NOTE,
    title="Another bucket size would hide more communication",
    summary="other bucket sizes would hide more communication, with the predicted gain (`--profile`)",
    needs=(Need.OVERLAP,),
    order=607,
)

# A smaller gain is not worth an experiment.
_LEAST_SHARE = 0.05
_LEAST_NS = 1_000_000
_MIB = 1 << 20
_DEFAULT = (1 * _MIB, 25 * _MIB)


def find(context: RuleContext) -> list[Finding]:
    overlap = context.overlap
    advice = overlap.advice if overlap is not None and not overlap.machine_too_busy else None
    if advice is None or advice.gain_ns < max(_LEAST_NS, _LEAST_SHARE * advice.step_ns):
        return []
    return [_finding(context, advice)]


def _finding(context: RuleContext, advice: BucketAdvice) -> Finding:
    module = next(key for key in context.modules() if context.attempt.number(key) == advice.module)
    return context.finding(
        RULE,
        f"{_capitalised(_option(advice.best))} should save {advice.gain_ns / 1e6:.1f} ms of a "
        f"{advice.step_ns / 1e6:.1f} ms step ({advice.gain_ns / advice.step_ns:.0%}): {_count(advice.best)} instead of "
        f"{advice.now.buckets}. This is a simulation. It uses the measured times at which gradients were ready, "
        f"and a latency of {advice.latency_ns / 1e6:.2f} ms and a bandwidth of {advice.bandwidth_gbps:.3g} GB/s, "
        "fitted to the measured reductions.",
        module=module,
        evidence={
            "gain_ms": round(advice.gain_ns / 1e6, 3),
            "step_ms": round(advice.step_ns / 1e6, 3),
            "backward_ms": {
                "measured": round(advice.measured_ns / 1e6, 3),
                "simulated": round(advice.now.backward_ns / 1e6, 3),
                f"with {_option(advice.best)}": round(advice.best.backward_ns / 1e6, 3),
            },
            "latency_ms": round(advice.latency_ns / 1e6, 3),
            "bandwidth_gbps": advice.bandwidth_gbps,
        },
        cause=f"gradients are reduced in {_count(advice.now)}, which do not overlap well with the backward",
        fix=f"Try {_fix(advice.best)}, and measure the result.",
    )


def _option(layout: BucketLayout) -> str:
    """The option of DDP's constructor for this layout."""
    if (layout.first_bytes, layout.cap_bytes) == _DEFAULT:
        return "the default bucket_cap_mb"
    if layout.first_bytes == layout.cap_bytes:
        return f"bucket_cap_mb={layout.cap_bytes / _MIB:g}"
    return f"bucket_cap_mb_list=[{layout.first_bytes / _MIB:g}, {layout.cap_bytes / _MIB:g}]"


def _fix(layout: BucketLayout) -> str:
    if _option(layout).startswith("bucket_cap_mb_list"):
        return f"DistributedDataParallel(model, {_option(layout)}), which newer versions of torch support"
    if _option(layout).startswith("the"):
        return "DistributedDataParallel(model) without bucket_cap_mb"
    return f"DistributedDataParallel(model, {_option(layout)})"


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:] if text.startswith("the ") else text


def _count(layout: BucketLayout) -> str:
    return "1 bucket" if layout.buckets == 1 else f"{layout.buckets} buckets"
