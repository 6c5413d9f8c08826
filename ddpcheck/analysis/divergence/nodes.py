"""Nodes that hold different replicas, told by each node's own records where those of the others are not here.

With the records of all ranks the rules say more; this speaks only where they cannot.
"""

from __future__ import annotations

from ddpcheck.analysis.aggregate.launch import first_node_mismatch
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.records.kinds.nodes import NodeMismatchRecord

_CODES = {Stage.INIT_AFTER.value: "DDP101", Stage.BUFFERS.value: "DDP210", Stage.PARAMS.value: "DDP201"}


def apart_findings(case: RuleContext, code: str) -> list[Finding]:
    """Those of the rule `code`, at most one a module."""
    findings = []
    for module in case.modules():
        away = set(module[0]) - case.attempt.ranks.keys()
        found = first_node_mismatch(case.attempt, module) if away else None
        if found is None or _CODES[found[1].stage] != code:
            continue
        if not _shows_here(case, module, found[1].step):
            findings.append(_finding(case, module, *found))
    return findings


def _shows_here(case: RuleContext, module: ModuleKey, step: int) -> bool:
    """Whether ranks of this folder differ from each other by then: other rules tell that, and more of it."""
    tallies = case.attempt.agreement.stats
    firsts = [tally.first for (key, stage, _), tally in tallies.items() if key == module and stage in _CODES]
    return any(first is not None and first.moment.step <= step for first in firsts)


def _finding(case: RuleContext, module: ModuleKey, rank: int, record: NodeMismatchRecord) -> Finding:
    here = case.attempt.ranks[rank].header.host
    what = "buffers" if record.of == TensorKind.BUFFERS.value else "parameters"
    return case.finding(
        _CODES[record.stage],
        f"{_moment(record)}, rank {rank} on {here} and rank {record.other_rank} on {record.other_host} do not "
        f"hold the same {what}. Records of {record.other_host} are not in this run folder: which of them differ, and "
        "why, shows when the folders are joined.",
        module=module,
        step=record.step,
        stage=record.stage,
        ranks=tuple(sorted({rank, record.other_rank})),
        evidence={
            "hosts": {str(rank): here, str(record.other_rank): record.other_host},
            "digests": {str(rank): record.root, str(record.other_rank): record.other_root},
            "gradients_differed_before": _gradients_before(case, module, record),
        },
        cause=_cause(case, module, record),
        fix="Copy the run folders of all nodes to one place and run 'ddpcheck merge FOLDER...' on them.",
    )


def _moment(record: NodeMismatchRecord) -> str:
    if record.stage == Stage.INIT_AFTER.value:
        return "After wrapping"
    if record.stage == Stage.BUFFERS.value:
        return f"After synchronisation {record.step} of the buffers"
    return f"After step {record.step}"


def _gradients_before(case: RuleContext, module: ModuleKey, record: NodeMismatchRecord) -> bool:
    return any(
        other.stage == Stage.APPLIED.value and key == module and other.step <= record.step
        for rank in case.attempt.ranks.values()
        for key, other in rank.node_mismatches
    )


def _cause(case: RuleContext, module: ModuleKey, record: NodeMismatchRecord) -> str:
    if record.stage != Stage.PARAMS.value:
        return "replicas of different nodes were not brought together"
    if _gradients_before(case, module, record):
        return "the gradients that the optimizer applied differed between nodes already"
    return "the update was not the same on every node"
