"""DDP502: memory that an option would save."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.memory.checks import has_sharded_state, savings_of
from ddpcheck.formatting import size_text


def find(case: RuleContext) -> list[Finding]:
    attempt = case.attempt
    memories = {rank: memory for rank, memory in attempt.memory.ranks.items() if memory.parts}
    if not memories or not case.modules():
        return []
    # The fullest rank is the one that counts, and replicas hold the same.
    rank, memory = max(memories.items(), key=lambda item: item[1].most)
    group = max(len(module[0]) for module in case.modules())
    hooked = any(attempt.ranks[rank].comm_hooks.values())
    savings = savings_of(memory, group, has_sharded_state(attempt), hooked)
    if not savings:
        return []
    best = savings[0]
    told = "; ".join(f"{saving.option}: {size_text(saving.bytes)} ({saving.how})" for saving in savings)
    return [
        case.finding(
            "DDP502",
            f"Each rank could hold less than its {size_text(memory.most)}. {told}.",
            severity=Severity.NOTE,
            evidence={
                "most": memory.most,
                "savings": [{"option": saving.option, "bytes": saving.bytes} for saving in savings],
            },
            cause="DDP's and the optimizer's defaults spend memory for convenience",
            fix=f"If memory is short, try {best.option} first: it saves most.",
        )
    ]
