"""DDP202: gradients were applied without being reduced."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.gradients import BY_HAND, HOOKS_LOST, GradientDivergence
from ddpcheck.analysis.divergence.stages import evidence_of, partings
from ddpcheck.analysis.finding import Finding
from ddpcheck.formatting import name_ranks

_FIXES = {
    "wrapper bypassed": "Call the DDP wrapper itself, ddp(inputs), in the training loop, not ddp.module(inputs).",
    "no_sync open": "Leave no_sync() before the forward of the last micro-batch, so that its backward is reduced.",
    "forward inside no_sync, backward outside": "Run forward and backward of a micro-batch on the same side of "
    "no_sync(): what counts is where the forward ran.",
    "two forwards before two backwards": "Add the losses and call backward once, or run each backward before the "
    "next forward.",
    "second backward on one forward": "Add the losses and call backward once: DDP reduces one backward a forward.",
    BY_HAND: "Let loss.backward() fill the gradients, or all-reduce those you set by hand before the step.",
    HOOKS_LOST: "Move the model to its device and dtype before wrapping, and wrap again after replacing its memory.",
}
_UNFINISHED = (
    "Use every parameter in the forward, freeze those that are not used before wrapping, or pass "
    "find_unused_parameters=True."
)


def find(case: RuleContext) -> list[Finding]:
    return [_finding(case, parted) for parted in partings(case, "DDP202")]


def _finding(case: RuleContext, parted: GradientDivergence) -> Finding:
    found = parted.found
    evidence = evidence_of(case, parted)
    names = evidence["parameters"]["names"]
    who = name_ranks(parted.ranks or tuple(found.digests))
    return case.finding(
        "DDP202",
        f"At step {found.moment.step} the optimizer applies gradients that DDP did not reduce on {who} "
        f"({parted.cause}); every rank steps its own way.",
        found=found,
        ranks=parted.ranks or found.outlier_ranks(),
        parameter=parted.parameter or (names[0] if names else None),
        evidence=evidence,
        cause=parted.cause,
        fix=_FIXES.get(parted.cause, _UNFINISHED),
    )
