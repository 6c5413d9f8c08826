"""DDP301: two or more ranks trained on the same batch."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.data.same_batches import Sameness, sameness
from ddpcheck.analysis.data.split import EpochSplit
from ddpcheck.analysis.data.table import split_row
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.formatting import name_ranks

FIX = (
    "Give every rank its own share: a DistributedSampler (with the right rank and number of ranks) in the "
    "DataLoader; in an IterableDataset, take every world_size-th sample, starting at the rank."
)
_MESSAGES = {
    Sameness.DUPLICATED: "{who} trained on the same batch in {same} of {compared} forwards, first at step "
    "{step}: their work was done several times over, and the batch is smaller than it seems.",
    Sameness.CONSTANT: "{who} were given the same input in all {forwards} forwards, and it never changed: "
    "right for a measurement, not for training.",
    Sameness.NOW_AND_THEN: "{who} trained on the same batch in {same} of {compared} forwards, first at step "
    "{step}.",
}


def find(case: RuleContext) -> list[Finding]:
    return [finding for module in case.modules() for finding in _of_module(case, module)]


def _of_module(case: RuleContext, module: ModuleKey) -> list[Finding]:
    seen = case.attempt.data.of(module)
    verdict = sameness(seen)
    first = seen.batches.first
    if verdict is Sameness.NONE or first is None:
        return []
    ranks = seen.batches.ranks()
    message = _MESSAGES[verdict].format(
        who=name_ranks(ranks).capitalize(),
        same=seen.batches.same,
        compared=seen.batches.compared,
        forwards=seen.forwards,
        step=first.step,
    )
    evidence: dict[str, Any] = {
        "forwards_compared": seen.batches.compared,
        "forwards_with_the_same_batch": seen.batches.same,
        "batches_at_first": {str(rank): str(said) for rank, said in sorted(first.values.items())},
    }
    splits = case.attempt.data.splits.get(module, [])
    if splits:
        evidence["data_split"] = [split_row(splits[0])]
    duplicated = verdict is Sameness.DUPLICATED
    return [
        case.finding(
            "DDP301",
            message,
            severity=Severity.ERROR if duplicated else Severity.NOTE,
            module=module,
            step=first.step,
            stage="forward",
            ranks=ranks,
            evidence=evidence,
            cause=_cause(case, module, splits, ranks) if duplicated else "the same input on every rank",
            fix=FIX
            if verdict is not Sameness.CONSTANT
            else "Nothing, if this was meant to be a measurement.",
        )
    ]


def _cause(case: RuleContext, module: ModuleKey, splits: list[EpochSplit], ranks: tuple[int, ...]) -> str:
    if splits:
        replicas, share = splits[0].one("replicas"), splits[0].one("share")
        sampler = splits[0].one("sampler") or "sampler"
        if share is not None:
            return f"every rank's {sampler} takes itself for number {share} of {replicas}"
        if not any(splits[0].facts("replicas").values()):
            return f"no sampler splits the data: every rank draws the same samples ({sampler})"
        told = _taken_twice(splits[0], ranks, len(module[0]))
        if told:
            return told
    if module in case.attempt.data.iterable:
        return "an IterableDataset that is not split by rank gives all of it to every rank"
    return "ranks were handed the same data"


def _taken_twice(split: EpochSplit, ranks: tuple[int, ...], everyone: int) -> str:
    """What samplers say of themselves, where those of the ranks with the same batch say the same."""
    facts = [(split.facts("share").get(str(rank)), split.facts("replicas").get(str(rank))) for rank in ranks]
    if len(set(facts)) > 1 or None in facts[0]:
        return ""
    share, replicas = facts[0]
    told = f"the samplers of {name_ranks(ranks)} each take themselves for number {share} of {replicas}"
    return told if replicas == everyone else f"{told}, and {everyone} ranks train"
