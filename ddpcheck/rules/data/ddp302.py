"""DDP302: samples overlap between ranks, are missing, or are split unevenly."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.collectors.samples import SampleCollector
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.data.batches import Sameness, sameness
from ddpcheck.analysis.data.collector import EpochSplit, split_row
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.rules.rule import Need, Rule

RULE = Rule(
    code="DDP302",
    severity=Severity.WARNING,
    title="Samples overlap between ranks, are missing, or are split unevenly",
    summary="samples overlap between ranks, are missing, or are unevenly distributed",
    needs=(Need.DATA,),
)

_FIX = (
    "Use a DistributedSampler with the same seed on every rank, num_replicas set to the number of ranks and rank to "
    "this rank, and call set_epoch with the same number on every rank."
)
_MOST_ROWS = 5
_MOST_RANKS = 8


def find(context: RuleContext) -> list[Finding]:
    return [finding for module in context.modules_with_forwards() for finding in _of_module(context, module)]


def _of_module(context: RuleContext, module: ModuleKey) -> list[Finding]:
    # DDP301 reports equal batches, which are a worse effect of the same mistake.
    if sameness(context.attempt.data.of(module)) in (Sameness.DUPLICATED, Sameness.DELAYED):
        return []
    different_datasets = _different_datasets(context, module)
    if different_datasets:
        return different_datasets
    wrong = [(split, problems) for split, problems in _with_problems(context, module) if problems]
    certain = [
        (split, problems)
        for split, problems in wrong
        if split.same_data(len(module[0])) and split.known_sampler()
    ]
    chosen = certain or wrong
    if not chosen:
        return []
    split, problems = chosen[0]
    doubt = (
        ""
        if certain
        else " This is correct if ranks have different datasets, or if the sampler does it on purpose."
    )
    return [
        context.finding(
            RULE,
            f"In epoch {split.epoch}, {_joined(problems)}. This affects {len(chosen)} of "
            f"{len(context.attempt.data.splits[module])} epochs.{doubt}",
            severity=None if certain else Severity.NOTE,
            module=module,
            step=split.step,
            stage="forward",
            ranks=tuple(sorted(split.passes)),
            evidence={"data_split": [split_row(each) for each, _ in chosen[:_MOST_ROWS]]},
            cause=_cause(split, len(module[0])),
            fix=_FIX,
        )
    ]


def _different_datasets(context: RuleContext, module: ModuleKey) -> list[Finding]:
    """Each rank takes its share of a different dataset, so the other shares of it are never used."""
    ranks = len(module[0])
    chosen = [split for split in context.attempt.data.splits.get(module, []) if split.other_data(ranks)]
    if not chosen:
        return []
    split = chosen[0]
    if context.attempt.collector(SampleCollector).reordered(split.loader, module):
        return []  # DDP307: the same samples in another order
    lengths = {str(rank): int(length) for rank, length in split.facts("length").items()}
    drew = split.per_rank
    counts = ", ".join(
        f"rank {rank} {drew[rank]} of its {lengths[str(rank)]}" for rank in sorted(drew)[:_MOST_RANKS]
    )
    return [
        context.finding(
            RULE,
            f"In epoch {split.epoch}, ranks drew from different datasets, each 1 of {ranks} samples of its own: "
            f"{counts}. The other samples were not used, or several ranks used the same samples.",
            module=module,
            step=split.step,
            stage="forward",
            ranks=tuple(sorted(split.passes)),
            evidence={"data_split": [split_row(each) for each in chosen[:_MOST_ROWS]], "lengths": lengths},
            cause=f"a sampler splits one dataset among {ranks} ranks, but the ranks hold different datasets: already "
            "split by rank, or cut or shuffled with another seed on each",
            fix="Split once. Give every rank the same dataset (random_split and shuffles with one seed everywhere) "
            "and let DistributedSampler split it; or give each rank its own part and shuffle that.",
        )
    ]


def _with_problems(context: RuleContext, module: ModuleKey) -> list[tuple[EpochSplit, list[str]]]:
    all_ranks = len(module[0]) == context.attempt.world_size
    joined = context.attempt.joined(module)
    return [
        (split, _problems(split, all_ranks, joined)) for split in context.attempt.data.splits.get(module, [])
    ]


def _problems(split: EpochSplit, all_ranks: bool, joined: bool) -> list[str]:
    """What is wrong with an epoch. Padding and a dropped last batch are not wrong."""
    if any(split.facts("replacement").values()):
        return []
    problems = []
    # Counts are estimated from every n-th sample, with an error of a few times n.
    error = 0 if split.exact else 4 * max(each.loader.stride for each in split.passes.values())
    padding = split.padding or 0
    allowed = max(len(split.passes) - 1, padding if padding <= split.global_batch else 0) + error
    about = "" if split.exact else "about "
    overlaps = split.overlap is not None and split.overlap > allowed
    if overlaps:
        problems.append(f"{about}{split.overlap} of {split.samples} samples were used by several ranks")
    split_by_sampler = bool(split.one("replicas")) and all_ranks
    if (
        split.missing is not None
        and split.missing > split.global_batch + error
        and (overlaps or split_by_sampler)
    ):
        problems.append(f"{about}{split.missing} were not used")
    if split.complete and not joined and split.regular() and _uneven(split):
        shares = split.per_rank
        problems.append(f"ranks drew between {min(shares.values())} and {max(shares.values())} samples")
    return problems


def _uneven(split: EpochSplit) -> bool:
    shares = list(split.per_rank.values())
    largest = max(each.epoch.largest for each in split.passes.values())
    return max(shares) - min(shares) > max(largest, 0.1 * max(shares))


def _joined(problems: list[str]) -> str:
    return problems[0] if len(problems) == 1 else f"{', '.join(problems[:-1])} and {problems[-1]}"


def _cause(split: EpochSplit, ranks: int) -> str:
    replicas = split.facts("replicas")
    if not any(replicas.values()):
        return f"no sampler splits the data among the ranks ({split.one('sampler') or 'several samplers'})"
    if len(set(split.facts("seed").values())) > 1:
        seeds = ", ".join(f"rank {rank}: {seed}" for rank, seed in list(split.facts("seed").items())[:8])
        return f"the samplers' seeds differ ({seeds}), so each rank takes its share of a different order"
    if len({each.epoch.at for each in split.passes.values()}) > 1:
        return "set_epoch received another number on some rank, so each rank takes its share of a different order"
    if set(replicas.values()) != {ranks}:
        counts = " or ".join(sorted(map(str, set(replicas.values()))))
        return f"samplers split the data among {counts}, but {ranks} ranks train"
    if len(set(split.facts("share").values())) < ranks:
        return "several samplers are configured as the same rank"
    return "the samplers do not split the same order of samples"
