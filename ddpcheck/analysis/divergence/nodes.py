"""Findings about replicas of different nodes, from one node's records alone.

They are used only if the records of the other nodes are not in the run folder. With the records of all ranks, the
rules compare the ranks directly and report more.
"""

from __future__ import annotations

from ddpcheck.analysis.aggregate.launch import first_node_mismatch
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.records.kinds.rank import NodeMismatchRecord
from ddpcheck.rules.rule import Rule

# Stages at which nodes compare their replicas.
_COMPARED = (Stage.INIT_AFTER.value, Stage.BUFFERS.value, Stage.PARAMS.value)


def node_findings(context: RuleContext, rule: Rule, stage: Stage) -> list[Finding]:
    """The mismatches between nodes whose first one is at `stage`, at most one per module."""
    findings = []
    for module in context.modules():
        absent = set(module[0]) - context.attempt.ranks.keys()
        mismatch = first_node_mismatch(context.attempt, module) if absent else None
        if mismatch is None or mismatch[1].stage != stage.value:
            continue
        if not _differs_here(context, module, mismatch[1].step):
            findings.append(_finding(context, rule, module, *mismatch))
    return findings


def _differs_here(context: RuleContext, module: ModuleKey, step: int) -> bool:
    """Whether ranks of this folder differ from each other by then: then the rules report that."""
    comparisons = context.attempt.agreement.stats
    firsts = [
        stats.first for (key, stage, _), stats in comparisons.items() if key == module and stage in _COMPARED
    ]
    return any(first is not None and first.key.step <= step for first in firsts)


def _finding(
    context: RuleContext, rule: Rule, module: ModuleKey, rank: int, record: NodeMismatchRecord
) -> Finding:
    host = context.attempt.ranks[rank].header.host
    kind = "buffers" if record.of == TensorKind.BUFFERS.value else "parameters"
    return context.finding(
        rule,
        f"{_when(record)}, the {kind} of rank {rank} on {host} and rank {record.other_rank} on {record.other_host} "
        f"differ. The records of {record.other_host} are not in this run folder: merge the run folders to see "
        f"which {kind} differ and why.",
        module=module,
        step=record.step,
        stage=record.stage,
        ranks=tuple(sorted({rank, record.other_rank})),
        evidence={
            "hosts": {str(rank): host, str(record.other_rank): record.other_host},
            "digests": {str(rank): record.root, str(record.other_rank): record.other_root},
            "gradients_differed_before": _gradients_differed(context, module, record),
        },
        cause=_cause(context, module, record),
        fix="Copy the run folders of all nodes to one machine and run 'ddpcheck merge FOLDER...' on them.",
    )


def _when(record: NodeMismatchRecord) -> str:
    if record.stage == Stage.INIT_AFTER.value:
        return "After wrapping"
    if record.stage == Stage.BUFFERS.value:
        return f"After synchronisation {record.step} of the buffers"
    return f"After step {record.step}"


def _gradients_differed(context: RuleContext, module: ModuleKey, record: NodeMismatchRecord) -> bool:
    return any(
        other.stage == Stage.APPLIED.value and key == module and other.step <= record.step
        for rank in context.attempt.ranks.values()
        for key, other in rank.node_mismatches
    )


def _cause(context: RuleContext, module: ModuleKey, record: NodeMismatchRecord) -> str:
    if record.stage != Stage.PARAMS.value:
        return "replicas on different nodes were not synchronised"
    if _gradients_differed(context, module, record):
        return "the gradients that the optimizer applied already differed between nodes"
    return "the update was not the same on every node"
