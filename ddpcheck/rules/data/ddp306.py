"""DDP306: ranks drew the same random numbers."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.data.batches import SameBatches
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.rules.rule import Rule, first_sentence

RULE = Rule(
    code="DDP306",
    severity=Severity.WARNING,
    title="Ranks drew the same random numbers",
    summary="ranks drew the same random numbers (dropout masks, noise)",
    headline=first_sentence,
)

# Once may be the first step after a common seed; from the second on, the generators stay in step.
_FEWEST_STEPS = 2
# An input that is the same on all ranks may sometimes have other reasons.
_FEWEST_INPUTS = 3
_INSIDE = (
    "{ranks} drew the same random numbers between forward and backward in {same} of the {compared} steps that drew "
    "any, first at step {step}. Their dropout masks and noise are identical."
)
_BEFORE = (
    "{ranks} drew the same random numbers before the forward and received the same new tensor besides their own "
    "data in {same} of {compared} forwards, first at step {step}. Their noise, time steps or masks are identical."
)


def find(context: RuleContext) -> list[Finding]:
    return [finding for module in context.modules_with_forwards() for finding in _of_module(context, module)]


def _of_module(context: RuleContext, module: ModuleKey) -> list[Finding]:
    inputs = context.attempt.data.of(module)
    for draws, fewest, message in (
        (inputs.draws, _FEWEST_STEPS, _INSIDE),
        (inputs.drawn_inputs, _FEWEST_INPUTS, _BEFORE),
    ):
        if draws.same >= fewest and 2 * draws.same >= draws.compared:
            return _finding(context, module, draws, message)
    return []


def _finding(context: RuleContext, module: ModuleKey, draws: SameBatches, message: str) -> list[Finding]:
    ranks, first = draws.ranks(), draws.first
    assert first is not None
    return [
        context.finding(
            RULE,
            message.format(
                ranks=name_ranks(ranks).capitalize(),
                same=draws.same,
                compared=draws.compared,
                step=first.step,
            ),
            module=module,
            step=first.step,
            stage="forward",
            ranks=ranks,
            evidence={
                "steps_that_drew": draws.compared,
                "steps_with_the_same_numbers": draws.same,
                "generators_at_first": {str(rank): state for rank, state in sorted(first.values.items())},
            },
            cause="every rank seeded its generator with the same number",
            fix="Seed again after wrapping, with a different number on each rank: torch.manual_seed(seed + rank). "
            "Where all ranks must draw the same numbers, such as noise that is added to reduced gradients or to "
            "parameters, give that code a torch.Generator of its own first, with the same seed on every rank.",
        )
    ]
