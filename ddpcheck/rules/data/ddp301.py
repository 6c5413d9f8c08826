"""DDP301: two or more ranks trained on the same batch."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.aggregate.rank_data import ModuleKey, is_sharded_root
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.data.batches import ModuleBatches, Sameness, sameness
from ddpcheck.analysis.data.collector import EpochSplit, split_row
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.sharding.collector import ShardReductionCollector
from ddpcheck.formatting import name_ranks
from ddpcheck.rules.rule import Rule, first_sentence

RULE = Rule(
    code="DDP301",
    severity=Severity.ERROR,
    title="Two or more ranks trained on the same batch",
    summary="two or more ranks trained on the same batch",
    headline=first_sentence,
)

_FIX = (
    "Give every rank its own share: use a DistributedSampler (with the correct rank and num_replicas) in the "
    "DataLoader. In an IterableDataset, take every world_size-th sample, starting at the rank."
)
_MESSAGES = {
    Sameness.DUPLICATED: "{ranks} trained on the same batch in {same} of {compared} forwards, first at step "
    "{step}. They duplicate each other's work, and the global batch is smaller than configured.",
    Sameness.CONSTANT: "{ranks} received the same input in all {forwards} forwards, and it never changed. "
    "This is correct for a benchmark, not for training.",
    Sameness.SHARED_INPUT: "{ranks} were given the same input in {same} of {compared} forwards, first at step {step}, "
    "but computed different gradients: what they learn from it differs.",
    Sameness.NOW_AND_THEN: "{ranks} trained on the same batch in {same} of {compared} forwards, first at step "
    "{step}.",
}


_FIXES = {
    Sameness.CONSTANT: "Nothing, if this is a benchmark.",
    Sameness.SHARED_INPUT: "Nothing, if ranks share this input on purpose: the same prompts, candidates or validation "
    "batches.",
}


def find(context: RuleContext) -> list[Finding]:
    return [finding for module in context.modules_with_forwards() for finding in _of_module(context, module)]


def _of_module(context: RuleContext, module: ModuleKey) -> list[Finding]:
    inputs = context.attempt.data.of(module)
    verdict = sameness(inputs)
    if verdict is Sameness.DELAYED:
        return [_delayed(context, module, inputs)]
    first = inputs.batches.first
    if verdict is Sameness.NONE or first is None:
        return []
    ranks = inputs.batches.ranks()
    if verdict is Sameness.DUPLICATED and _learn_differently(context, module, ranks):
        verdict = Sameness.SHARED_INPUT
    message = _MESSAGES[verdict].format(
        ranks=name_ranks(ranks).capitalize(),
        same=inputs.batches.same,
        compared=inputs.batches.compared,
        forwards=inputs.forwards,
        step=first.step,
    )
    evidence: dict[str, Any] = {
        "forwards_compared": inputs.batches.compared,
        "forwards_with_the_same_batch": inputs.batches.same,
        "batches_at_first": {str(rank): str(digest) for rank, digest in sorted(first.values.items())},
    }
    splits = context.attempt.data.splits.get(module, [])
    if splits:
        evidence["data_split"] = [split_row(splits[0])]
    duplicated = verdict is Sameness.DUPLICATED
    return [
        context.finding(
            RULE,
            message,
            severity=None if duplicated else Severity.NOTE,
            module=module,
            step=first.step,
            stage="forward",
            ranks=ranks,
            evidence=evidence,
            cause=_cause(context, module, splits, ranks) if duplicated else "the same input on every rank",
            fix=_FIXES.get(verdict, _FIX),
        )
    ]


def _delayed(context: RuleContext, module: ModuleKey, inputs: ModuleBatches) -> Finding:
    delays = inputs.delays()
    earlier, later, delay = delays[0]
    count = inputs.delayed[delays[0]]
    splits = context.attempt.data.splits.get(module, [])
    forwards = "forward" if delay == 1 else "forwards"
    return context.finding(
        RULE,
        f"Rank {later} trained on the batches of rank {earlier}, {delay} {forwards} later, in {count} of "
        f"{inputs.batches.compared} forwards. Each pass uses samples several times, by one rank after the other.",
        severity=Severity.WARNING,
        module=module,
        step=0,
        stage="forward",
        ranks=tuple(sorted({rank for pair in delays for rank in pair[:2]})),
        evidence={
            "forwards_compared": inputs.batches.compared,
            "forwards_with_an_earlier_batch": count,
            "forwards_later": delay,
            **({"data_split": [split_row(splits[0])]} if splits else {}),
        },
        cause="ranks read the same sequence of samples at different positions, and nothing splits it",
        fix=_FIX,
    )


def _learn_differently(context: RuleContext, module: ModuleKey, ranks: tuple[int, ...]) -> bool:
    """Whether ranks with the same input computed different gradients at all steps at which both are known.

    Dropout and the arithmetic of a device also make gradients differ; then the way in which the data are split decides.
    """
    if is_sharded_root(module):
        return _shards_learn_differently(context, module, ranks)
    checks = context.attempt.gradients.stats.get(module)
    batches = context.attempt.data.of(module).batches
    if checks is None:
        return False
    known = [step for step in batches.steps if step in checks.sketched_steps]
    if not known:
        return False
    wanted = set(ranks)
    identical = [steps for group, steps in checks.identical_steps.items() if wanted <= set(group)]
    if any(step in steps for steps in identical for step in known):
        return False
    on_device = any(memory.device != "cpu" for memory in context.attempt.memory.ranks.values())
    if not batches.drew and not on_device:
        return True
    data = context.attempt.data
    return not data.splits.get(module) and module not in data.iterable


def _shards_learn_differently(context: RuleContext, module: ModuleKey, ranks: tuple[int, ...]) -> bool:
    """The ranks of a sharded module may also divide a batch among themselves, as with sequence parallelism."""
    same = context.attempt.collector(ShardReductionCollector).local_gradients(ranks)
    if any(same.get(step) for step in context.attempt.data.of(module).batches.steps):
        return False
    splits = context.attempt.data.splits.get(module, [])
    return not splits or any(splits[0].facts("replicas").values())


def _cause(context: RuleContext, module: ModuleKey, splits: list[EpochSplit], ranks: tuple[int, ...]) -> str:
    if splits:
        replicas, share = splits[0].one("replicas"), splits[0].one("share")
        sampler = splits[0].one("sampler") or "sampler"
        if share is not None:
            return f"every rank's {sampler} is configured as rank {share} of {replicas}"
        if not any(splits[0].facts("replicas").values()):
            return f"no sampler splits the data: every rank draws the same samples ({sampler})"
        shared = _shared_share(splits[0], ranks, len(module[0]))
        if shared:
            return shared
    if module in context.attempt.data.iterable:
        return "an IterableDataset that is not split by rank yields every sample on every rank"
    return "ranks received the same data"


def _shared_share(split: EpochSplit, ranks: tuple[int, ...], world_size: int) -> str:
    """The configuration of the samplers, if it is the same on all ranks with the same batch."""
    facts = [(split.facts("share").get(str(rank)), split.facts("replicas").get(str(rank))) for rank in ranks]
    if len(set(facts)) > 1 or None in facts[0]:
        return ""
    share, replicas = facts[0]
    text = f"the samplers of {name_ranks(ranks)} are each configured as rank {share} of {replicas}"
    return text if replicas == world_size else f"{text}, but {world_size} ranks train"
