"""DDP502: an option would save memory."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.memory.table import has_sharded_state, savings_of
from ddpcheck.formatting import size_text
from ddpcheck.rules.rule import Need, Rule

RULE = Rule(
    code="DDP502",
    severity=Severity.NOTE,
    title="An option would save memory",
    summary="an option would save memory: how many bytes",
    needs=(Need.MEMORY,),
    order=604.7,
)


def find(context: RuleContext) -> list[Finding]:
    attempt = context.attempt
    memories = {rank: memory for rank, memory in attempt.memory.ranks.items() if memory.parts}
    if not memories or not context.modules():
        return []
    # The rank with the highest peak decides; replicas hold the same.
    rank, memory = max(memories.items(), key=lambda item: item[1].most)
    group = max(len(module[0]) for module in context.modules())
    hooked = any(attempt.ranks[rank].comm_hooks.values())
    savings = savings_of(memory, group, has_sharded_state(attempt), hooked)
    if not savings:
        return []
    best = savings[0]
    options = "; ".join(f"{saving.option}: {size_text(saving.bytes)} ({saving.how})" for saving in savings)
    return [
        context.finding(
            RULE,
            f"Options would reduce the peak memory of each rank ({size_text(memory.most)}). {options}.",
            evidence={
                "most": memory.most,
                "savings": [{"option": saving.option, "bytes": saving.bytes} for saving in savings],
            },
            cause="the defaults of DDP and of the optimizer trade memory for convenience",
            fix=f"If memory is short, try {best.option} first: it saves the most.",
        )
    ]
