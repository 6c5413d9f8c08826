"""DDP306: ranks drew the same random numbers."""

from __future__ import annotations

from ddpcheck.analysis.agreement import ModuleKey
from ddpcheck.analysis.case import Case, name_ranks
from ddpcheck.analysis.findings import Finding, Severity

# Once can be the first step after a common seed; from the second on it will stay so.
LEAST = 2


def find(case: Case) -> list[Finding]:
    return [finding for module in case.modules() for finding in _of_module(case, module)]


def _of_module(case: Case, module: ModuleKey) -> list[Finding]:
    draws = case.attempt.data.of(module).draws
    first = draws.first
    if first is None or draws.same < LEAST or 2 * draws.same < draws.compared:
        return []
    ranks = draws.ranks()
    return [
        case.finding(
            "DDP306",
            f"{name_ranks(ranks).capitalize()} drew the same random numbers between forward and step in "
            f"{draws.same} of the {draws.compared} steps that drew any, first at step {first.step}: "
            "dropout masks and noise are copies of each other.",
            severity=Severity.WARNING,
            module=module,
            step=first.step,
            stage="forward",
            ranks=ranks,
            evidence={
                "steps_that_drew": draws.compared,
                "steps_with_the_same_numbers": draws.same,
                "generators_at_first": {str(rank): said for rank, said in sorted(first.said.items())},
            },
            cause="every rank seeded its generator alike",
            fix="Seed once more after wrapping, with another number on each rank: "
            "torch.manual_seed(seed + rank).",
        )
    ]
