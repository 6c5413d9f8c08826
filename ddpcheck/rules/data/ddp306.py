"""DDP306: ranks drew the same random numbers."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.data.batches import SameBatches
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.formatting import name_ranks

# Once can be the first step after a common seed; from the second on it will stay so.
LEAST = 2
# An input that is the same on all ranks may have other reasons now and then.
LEAST_INPUTS = 3
_INSIDE = (
    "{who} drew the same random numbers between forward and step in {same} of the {compared} steps that drew any, "
    "first at step {step}: dropout masks and noise are copies of each other."
)
_BEFORE = (
    "{who} drew the same random numbers before the forward and were handed the same new tensor beside their own "
    "data in {same} of {compared} forwards, first at step {step}: noise, time steps or masks are copies of each other."
)


def find(case: RuleContext) -> list[Finding]:
    return [finding for module in case.modules() for finding in _of_module(case, module)]


def _of_module(case: RuleContext, module: ModuleKey) -> list[Finding]:
    seen = case.attempt.data.of(module)
    for draws, least, told in ((seen.draws, LEAST, _INSIDE), (seen.drawn_inputs, LEAST_INPUTS, _BEFORE)):
        if draws.same >= least and 2 * draws.same >= draws.compared:
            return _finding(case, module, draws, told)
    return []


def _finding(case: RuleContext, module: ModuleKey, draws: SameBatches, told: str) -> list[Finding]:
    ranks, first = draws.ranks(), draws.first
    assert first is not None
    return [
        case.finding(
            "DDP306",
            told.format(
                who=name_ranks(ranks).capitalize(), same=draws.same, compared=draws.compared, step=first.step
            ),
            severity=Severity.WARNING,
            module=module,
            step=first.step,
            stage="forward",
            ranks=ranks,
            evidence={
                "steps_that_drew": draws.compared,
                "steps_with_the_same_numbers": draws.same,
                "generators_at_first": {str(rank): said for rank, said in sorted(first.values.items())},
            },
            cause="every rank seeded its generator alike",
            fix="Seed once more after wrapping, with another number on each rank: "
            "torch.manual_seed(seed + rank).",
        )
    ]
