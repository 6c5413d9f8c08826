"""DDP302: samples overlap between ranks, are missing, or ranks got uneven shares."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.data.same_batches import Sameness, sameness
from ddpcheck.analysis.data.split import EpochSplit
from ddpcheck.analysis.data.table import split_row
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.module_key import ModuleKey

FIX = (
    "Use a DistributedSampler with the same seed on every rank, num_replicas the number of ranks and rank "
    "this rank's own, and let set_epoch get the same number everywhere."
)
MOST_ROWS = 5
MOST_TOLD = 8


def find(case: RuleContext) -> list[Finding]:
    return [finding for module in case.modules() for finding in _of_module(case, module)]


def _of_module(case: RuleContext, module: ModuleKey) -> list[Finding]:
    # Equal batches are the graver side of the same mistake, and tell of it better.
    if sameness(case.attempt.data.of(module)) is Sameness.DUPLICATED:
        return []
    apart = _other_data(case, module)
    if apart:
        return apart
    wrong = [(split, problems) for split, problems in _judged(case, module) if problems]
    solid = [
        (split, problems)
        for split, problems in wrong
        if split.same_data(len(module[0])) and split.known_sampler()
    ]
    chosen = solid or wrong
    if not chosen:
        return []
    split, problems = chosen[0]
    doubt = "" if solid else " Right, if ranks have datasets of their own, or the sampler is meant to."
    return [
        case.finding(
            "DDP302",
            f"In epoch {split.epoch}, {_joined(problems)}; {len(chosen)} of "
            f"{len(case.attempt.data.splits[module])} epochs are like this.{doubt}",
            severity=Severity.WARNING if solid else Severity.NOTE,
            module=module,
            step=split.step,
            stage="forward",
            ranks=tuple(sorted(split.passes)),
            evidence={"data_split": [split_row(each) for each, _ in chosen[:MOST_ROWS]]},
            cause=_cause(split, len(module[0])),
            fix=FIX,
        )
    ]


def _other_data(case: RuleContext, module: ModuleKey) -> list[Finding]:
    """Each rank takes its share of another dataset: what the others would have taken of it is never seen."""
    ranks = len(module[0])
    chosen = [split for split in case.attempt.data.splits.get(module, []) if split.other_data(ranks)]
    if not chosen:
        return []
    split = chosen[0]
    lengths = {str(rank): int(length) for rank, length in split.facts("length").items()}
    drew = split.per_rank
    told = ", ".join(
        f"rank {rank} {drew[rank]} of its {lengths[str(rank)]}" for rank in sorted(drew)[:MOST_TOLD]
    )
    return [
        case.finding(
            "DDP302",
            f"In epoch {split.epoch}, ranks drew from datasets that are not the same, each 1 of {ranks} samples of its "
            f"own: {told}. The rest was not seen, or samples went to several ranks.",
            severity=Severity.WARNING,
            module=module,
            step=split.step,
            stage="forward",
            ranks=tuple(sorted(split.passes)),
            evidence={"data_split": [split_row(each) for each in chosen[:MOST_ROWS]], "lengths": lengths},
            cause=f"a sampler deals one dataset out to {ranks} ranks, but the ranks hold different ones: already "
            "split by rank, or cut or shuffled with another seed on each",
            fix="Split once. Give every rank the same dataset (random_split and shuffles with one seed everywhere) "
            "and let DistributedSampler deal it out; or give each rank its own part, and shuffle that.",
        )
    ]


def _judged(case: RuleContext, module: ModuleKey) -> list[tuple[EpochSplit, list[str]]]:
    whole_world = len(module[0]) == case.attempt.world_size
    joined = case.attempt.joined(module)
    return [
        (split, problems_of(split, whole_world, joined)) for split in case.attempt.data.splits.get(module, [])
    ]


def problems_of(split: EpochSplit, whole_world: bool, joined: bool) -> list[str]:
    """What is wrong with an epoch, in words; nothing where samplers pad, or leave out the last batch."""
    if any(split.facts("replacement").values()):
        return []
    problems = []
    # An estimate from every so-manieth sample is off by a few of them.
    error = 0 if split.exact else 4 * max(each.loader.stride for each in split.passes.values())
    padding = split.padding or 0
    allowed = max(len(split.passes) - 1, padding if padding <= split.global_batch else 0) + error
    about = "" if split.exact else "about "
    overlaps = split.overlap is not None and split.overlap > allowed
    if overlaps:
        problems.append(f"{about}{split.overlap} of {split.samples} samples went to several ranks")
    dealt = bool(split.one("replicas")) and whole_world
    if split.missing is not None and split.missing > split.global_batch + error and (overlaps or dealt):
        problems.append(f"{about}{split.missing} were left out")
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
        return f"the samplers' seeds differ ({seeds}), so each rank cuts its share from another order"
    if len({each.epoch.at for each in split.passes.values()}) > 1:
        return "set_epoch got another number on some rank, so each rank cuts its share from another order"
    if set(replicas.values()) != {ranks}:
        told = " or ".join(sorted(map(str, set(replicas.values()))))
        return f"samplers split the data among {told}, and {ranks} ranks train"
    if len(set(split.facts("share").values())) < ranks:
        return "several samplers take themselves for the same rank"
    return "the samplers do not deal out one and the same order"
