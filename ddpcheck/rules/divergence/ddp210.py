"""DDP210: buffers differ after synchronisation, or are mapped to different names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from ddpcheck.analysis.aggregate.agreement import Disagreement, groups_of, outlier_ranks
from ddpcheck.analysis.aggregate.rank_data import ModuleKey, is_sharded_root
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.explain import node_findings
from ddpcheck.analysis.evidence import differing_tensors, of_disagreement
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.records.codecs import unpack_leaves
from ddpcheck.records.kinds.digests import NORM_STATISTICS, DigestRecord, Stage, TensorKind
from ddpcheck.records.reasons import BufferState, is_stored_as
from ddpcheck.rules.rule import Location, Need, Rule

RULE = Rule(
    code="DDP210",
    severity=Severity.ERROR,
    title="Buffers differ after synchronisation",
    summary="buffers differ after synchronisation",
    needs=(Need.BUFFERS_AFTER_WRAPPING, Need.SYNCHRONISED_BUFFERS),
    live=True,
    replicas_diverge=True,
    location=Location.STEP,
)


_MOST_NAMES = 10


def find(context: RuleContext) -> list[Finding]:
    findings = []
    for module in context.modules():
        findings += _names(context, module) or _values(context, module) or _at_the_end(context, module)
    for module in context.attempt.sharded_roots():
        findings += _constants_of_shards(context, module) or _at_the_end(context, module)
    return findings + node_findings(context, RULE, Stage.BUFFERS)


def _names(context: RuleContext, module: ModuleKey) -> list[Finding]:
    names = {
        rank: [str(row[0]) for row in data.as_wrapped[module].buffers]
        for rank, data in context.attempt.of_module(module).items()
    }
    groups = [ranks for _, ranks in groups_of({rank: "\n".join(each) for rank, each in names.items()})]
    if len(groups) < 2:
        return []
    majority, other = names[groups[0][0]], names[groups[1][0]]
    index = next(i for i, (a, b) in enumerate(zip_longest(majority, other)) if a != b)
    at_index = {ranks: (*names[ranks[0]][index:], "missing")[0] for ranks in groups}
    return [
        context.finding(
            RULE,
            f"Buffers have another order on {name_ranks(groups[1])}: number {index} is "
            f"{at_index[groups[0]]} on {name_ranks(groups[0])} and {at_index[groups[1]]} on "
            f"{name_ranks(groups[1])}. DDP copies them by position.",
            module=module,
            stage=Stage.INIT_BEFORE.value,
            parameter=(majority[index:] or other[index:])[0],
            ranks=outlier_ranks(groups),
            evidence={
                "position": index,
                "names": {name_ranks(ranks): at_index[ranks] for ranks in groups[:4]},
            },
            cause="buffers mapped to different names",
            fix="Register buffers in the same order on every rank: iterate over lists or sorted names, never "
            "over sets.",
        )
    ]


def _values(context: RuleContext, module: ModuleKey) -> list[Finding]:
    first = context.attempt.agreement.stats_of(module, Stage.BUFFERS, TensorKind.BUFFERS).first
    if first is None:
        return []
    evidence = of_disagreement(context.attempt, first, context.folder)
    differing = evidence["parameters"]
    names = differing["names"]
    return [
        context.finding(
            RULE,
            f"After DDP synchronised the buffers (synchronisation {first.key.step}), {differing['count']} of "
            f"{differing['of']} differ across ranks. Outlier: {name_ranks(first.outlier_ranks())}.",
            disagreement=first,
            parameter=names[0] if names else None,
            evidence=evidence,
            cause="the synchronisation did not include these buffers",
            fix="Register the buffers before wrapping and in the same way on every rank, and do not replace "
            "DDP's buffer hooks with ones that skip buffers.",
        )
    ]


def _constants_of_shards(context: RuleContext, module: ModuleKey) -> list[Finding]:
    """Buffers of a sharded module that differ at the first forward, and that the training does not change."""
    agreement = context.attempt.agreement
    first = agreement.stats_of(module, Stage.INIT_AFTER, TensorKind.BUFFERS).first
    last = agreement.stats_of(module, Stage.BUFFERS_END, TensorKind.BUFFERS).first
    if first is None or last is None:
        return []
    rows = next(iter(context.attempt.of_module(module).values())).latest[module].buffers
    before, after = _leaves(first), _leaves(last)
    constant = [
        index
        for index in differing_tensors(context.attempt, first)
        if index < len(rows)
        and _is_table(rows[index])
        and all(leaves[index] == after.get(rank, {}).get(index) for rank, leaves in before.items())
    ]
    if not constant:
        return []
    names = [str(rows[index][0]) for index in constant]
    more = f" and {len(names) - 1} more buffers" if len(names) > 1 else ""
    ranks = outlier_ranks(
        [
            members
            for _, members in groups_of(
                {rank: repr([leaves[i] for i in constant]) for rank, leaves in before.items()}
            )
        ]
    )
    return [
        context.finding(
            RULE,
            f"{names[0]}{more} differ across ranks from the first forward on and never change: each rank computes "
            f"another function of the same weights. Outlier: {name_ranks(ranks)}.",
            severity=Severity.WARNING,
            module=module,
            stage=Stage.INIT_AFTER.value,
            parameter=names[0],
            ranks=ranks,
            evidence={"parameters": {"count": len(names), "of": len(rows), "names": names[:_MOST_NAMES]}},
            cause="FSDP does not synchronise buffers, and ranks initialised or loaded these differently",
            fix="Broadcast the buffers from one rank after sharding, or compute them from the same seed. Modules that "
            "are made on the meta device must initialise their buffers after to_empty(). Nothing, if each rank is "
            "meant to have its own.",
        )
    ]


def _leaves(disagreement: Disagreement) -> dict[int, dict[int, bytes]]:
    """By rank and index."""
    return {
        rank: dict(enumerate(unpack_leaves(record.leaves, record.width)))
        for rank, record in disagreement.digests.items()
        if isinstance(record, DigestRecord)
    }


def _at_the_end(context: RuleContext, module: ModuleKey) -> list[Finding]:
    """Compares ranks that wrote to buffers after their last step: only rank 0 may do so, to save them."""
    first = context.attempt.agreement.stats_of(module, Stage.BUFFERS_END, TensorKind.BUFFERS).first
    # Statistics of diverged models differ as expected; other rules report the divergence.
    if (
        first is None
        or context.attempt.agreement.stats_of(module, Stage.PARAMS, TensorKind.PARAMETERS).first is not None
    ):
        return []
    evidence = of_disagreement(context.attempt, first, context.folder)
    differing = evidence["parameters"]
    names = differing["names"]
    records = [record for record in first.digests.values() if isinstance(record, DigestRecord)]
    if any(is_stored_as(record.how, BufferState.NOT_SYNCED) for record in records):
        # Buffers of ranks that ended at different forwards differ as expected.
        same_forward = len({record.forward for record in records}) == 1
        return [_not_synchronised(context, first, evidence)] if same_forward else []
    # Other buffers may be private to a rank.
    statistics = any(name.rpartition(".")[2] in NORM_STATISTICS for name in names)
    return [
        context.finding(
            RULE,
            f"{name_ranks(tuple(first.digests)).capitalize()} wrote to buffers after the last step, and "
            f"{differing['count']} of {differing['of']} now differ across ranks. Outlier: "
            f"{name_ranks(first.outlier_ranks())}. Each rank evaluates a different model, and a checkpoint depends on "
            "the rank that saves it.",
            severity=Severity.WARNING if statistics else Severity.NOTE,
            disagreement=first,
            parameter=names[0] if names else None,
            evidence=evidence,
            cause="buffers were written after the last training step, on each rank from its own data",
            fix="Average the statistics over all ranks (all_reduce) after you recompute them, or broadcast "
            "rank 0's.",
        )
    ]


def _not_synchronised(context: RuleContext, first: Disagreement, evidence: dict[str, Any]) -> Finding:
    differing = evidence["parameters"]
    names = differing["names"]
    learned = sorted(set(names) & _learned(context, first.key.module))
    stats = context.attempt.agreement.stats_of(first.key.module, Stage.INIT_AFTER, TensorKind.BUFFERS)
    # Buffers that differed from the start are the finding of DDP101.
    drifted = bool(learned) and stats.first is None
    wrapper = "FSDP" if is_sharded_root(first.key.module) else "DDP"
    return context.finding(
        RULE,
        f"{wrapper} does not synchronise buffers here, and {differing['count']} of {differing['of']} differ across "
        f"ranks at the end, not counting normalisation statistics. Outlier: {name_ranks(first.outlier_ranks())}. "
        "Each rank evaluates a different model, and a checkpoint depends on the rank that saves it.",
        severity=Severity.WARNING if drifted else Severity.NOTE,
        disagreement=first,
        parameter=(learned or names or [None])[0],
        evidence=evidence,
        cause=("FSDP" if wrapper == "FSDP" else "broadcast_buffers=False")
        + ", and buffers that each rank updates from its own data",
        fix="Update them from values that were reduced or gathered first (a codebook by all_reduce of its sums, a "
        "queue by all_gather of its keys). Nothing, if each rank is meant to have its own buffers.",
    )


def _learned(context: RuleContext, module: ModuleKey) -> set[str]:
    """Buffers that hold more than a number: codebooks, queues, statistics. A counter or a running loss is a rank's own.

    What checkpoints do not contain is not compared at all.
    """
    record = next(iter(context.attempt.of_module(module).values())).latest[module]
    return {str(row[0]) for row in record.buffers if _is_table(row)}


def _is_table(row: Sequence[Any]) -> bool:
    _, dtype, shape, *_ = row
    return "float" in str(dtype) and math.prod(shape) > 1
