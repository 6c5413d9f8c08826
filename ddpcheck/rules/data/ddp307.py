"""DDP307: ranks use one index for different samples, or one sample with different labels."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ddpcheck.analysis.aggregate.agreement import groups_of, outlier_ranks
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.collectors.samples import (
    FEWEST,
    LabelDifference,
    LoaderSamples,
    PartStats,
    SampleCollector,
    Visit,
)
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks
from ddpcheck.rules.rule import Need, Rule, first_sentence

RULE = Rule(
    code="DDP307",
    severity=Severity.ERROR,
    title="Ranks have different labels or inputs for the same sample",
    summary="one sample has another label or another input on each rank, or files come in another order",
    needs=(Need.DATA,),
    headline=first_sentence,
)

# A part identifies samples if it has this many distinct values.
DISTINCT_INPUTS = 8
DISTINCT_LABELS = 3
# The share of differing pairs in which another part must be the same.
SAME_SHARE = 0.9
# Pairs of labels beyond the number of distinct ones, from which a renaming of classes is not a coincidence.
MORE_THAN_CLASSES = 12
_MOST_LABELS = 8
_PARTS = {"i": "label", "I": "integers", "f": "input"}


def find(context: RuleContext) -> list[Finding]:
    collected = context.attempt.collector(SampleCollector)
    findings = []
    for module in context.modules_with_forwards():
        for loader in collected.loaders():
            order = _order(context, module, collected, loader)
            samples = collected.samples.get(module, {}).get(loader)
            if order is not None:
                findings.append(order)
            elif collected.same_data(loader, module):
                contents = _contents(context, module, loader, samples) if samples is not None else []
                mapped = collected.label_difference(loader, module)
                findings += contents
                if mapped is not None and not contents:
                    findings.append(_mapped(context, module, mapped))
    return findings


def _mapped(context: RuleContext, module: ModuleKey, difference: LabelDifference) -> Finding:
    shown = list(difference.classes.items())[:_MOST_LABELS]
    label, classes = shown[0]
    by_class: dict[int, list[int]] = {}
    for rank, number in classes.items():
        by_class.setdefault(number, []).append(rank)
    example = "; ".join(f"class {number} on {name_ranks(ranks)}" for number, ranks in by_class.items())
    which = "a text" if label.startswith("#") else f"label {label}"
    return context.finding(
        RULE,
        f"The same labels of the data loader are given to the loss as different classes: {which} is {example}. Each "
        "rank always maps them in its own way.",
        module=module,
        step=difference.step,
        stage="backward",
        ranks=difference.outliers,
        evidence={
            "labels": len(difference.classes),
            "classes": {
                label: {f"rank {rank}": number for rank, number in by_rank.items()}
                for label, by_rank in shown
            },
        },
        cause="labels are mapped to other classes after the data loader has returned them",
        fix="Map labels to classes with one table that all ranks share, in the dataset, and not in the training loop.",
    )


def _order(
    context: RuleContext, module: ModuleKey, collected: SampleCollector, loader: int
) -> Finding | None:
    records = collected.reordered(loader, module)
    if not records:
        return None
    groups = groups_of({rank: " ".join(record.columns) for rank, record in records.items()})
    samples = collected.samples.get(module, {}).get(loader)
    return _order_finding(
        context,
        module,
        samples.first_step() if samples is not None else 0,
        outlier_ranks([ranks for _, ranks in groups]),
        {
            "entries": next(iter(records.values())).length,
            "order": {name_ranks(ranks): digest.split()[0] for digest, ranks in groups},
        },
    )


def _order_finding(
    context: RuleContext, module: ModuleKey, step: int, ranks: tuple[int, ...], evidence: dict[str, Any]
) -> Finding:
    return context.finding(
        RULE,
        "Ranks have the samples of the dataset in different orders, so one index names different samples: some samples "
        "are used by several ranks in an epoch, others by none.",
        severity=Severity.WARNING,
        module=module,
        step=step,
        stage="forward",
        ranks=ranks,
        evidence=evidence,
        cause="the list of samples has another order on each rank: os.listdir, glob and sets have no fixed order, and "
        "a shuffle has another seed",
        fix="Sort the list of files or samples, or shuffle it with the same seed on every rank, before a sampler "
        "splits it.",
    )


def _contents(context: RuleContext, module: ModuleKey, loader: int, samples: LoaderSamples) -> list[Finding]:
    stats = samples.stats()
    findings = []
    for number, part in enumerate(stats):
        if not part.stable or part.cross_differ < FEWEST:
            continue
        differing = samples.differing(number)
        equal_part = _part_that_agrees(stats, number, differing)
        if equal_part is not None or (part.is_label and _renamed(samples, stats, number)):
            findings.append(_differs(context, module, samples, stats, number, differing, equal_part))
    # DDP302 reports datasets with other entries, which have some samples under other indices too.
    splits = context.attempt.data.splits.get(module, [])
    if not findings and not any(each.loader == loader and each.other_data(len(module[0])) for each in splits):
        moved = [number for number, part in enumerate(stats) if part.stable and _moved(samples, part, number)]
        if moved:
            evidence = {"contents_under_another_index": samples.moved(moved[0])}
            findings.append(
                _order_finding(context, module, samples.first_step(), samples.outliers(moved[0]), evidence)
            )
    return findings


def _moved(samples: LoaderSamples, part: PartStats, number: int) -> bool:
    return (
        not part.is_label
        and part.cross_differ >= FEWEST
        and len(part.values) >= DISTINCT_INPUTS
        and samples.moved(number) >= FEWEST
    )


def _part_that_agrees(
    stats: list[PartStats], number: int, differing: list[tuple[int, Visit, Visit]]
) -> int | None:
    """Another part that is the same where this one differs: the ranks do have the same sample."""
    for other, part in enumerate(stats):
        if other == number or len(part.values) < (DISTINCT_LABELS if part.is_label else DISTINCT_INPUTS):
            continue
        same = sum(one.parts[other] == two.parts[other] for _, one, two in differing)
        enough = same >= (MORE_THAN_CLASSES if part.is_label else FEWEST)
        # With few classes, different samples often have the same label: it has to agree in every pair.
        least = 1.0 if part.is_label else SAME_SHARE
        if enough and same >= least * len(differing) and (not part.is_label or not part.cross_differ):
            return other
    return None


def _renamed(samples: LoaderSamples, stats: list[PartStats], number: int) -> bool:
    """Whether each rank has the classes of the others under other numbers, where inputs are augmented at random."""
    if any(part.stable for other, part in enumerate(stats) if other != number):
        return False
    pairs: dict[tuple[int, int], set[tuple[str, str]]] = defaultdict(set)
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for _, one, two in samples.pairs(True):
        first, second = sorted((one, two), key=lambda visit: visit.rank)
        key = (first.rank, second.rank)
        pairs[key].add((first.parts[number], second.parts[number]))
        counts[key] += 1
    more = 0
    for key, mapping in pairs.items():
        if len({one for one, _ in mapping}) < len(mapping) or len({two for _, two in mapping}) < len(mapping):
            return False
        more += counts[key] - len(mapping)
    return len(stats[number].values) >= DISTINCT_LABELS and more >= MORE_THAN_CLASSES


def _differs(
    context: RuleContext,
    module: ModuleKey,
    samples: LoaderSamples,
    stats: list[PartStats],
    number: int,
    differing: list[tuple[int, Visit, Visit]],
    equal_part: int | None,
) -> Finding:
    part = stats[number]
    index, one, two = differing[0]
    kind = _PARTS[part.kind]
    subject = {
        "i": "the same samples have different labels",
        "I": "the same samples are encoded differently",
        "f": "the same samples have different inputs",
    }[part.kind]
    while_equal = (
        f", while their {_PARTS[stats[equal_part].kind]} is the same" if equal_part is not None else ""
    )
    ranks = samples.outliers(number)
    compared = part.cross_equal + part.cross_differ
    cause, fix = _CAUSES[part.kind]
    return context.finding(
        RULE,
        f"On different ranks, {subject}: in {part.cross_differ} of {compared} comparisons{while_equal}. Sample {index} "
        f"differs between rank {one.rank} and rank {two.rank}; on one rank it is always the same.",
        severity={"i": Severity.ERROR, "I": Severity.WARNING, "f": Severity.NOTE}[part.kind],
        module=module,
        step=min(max(first.step, second.step) for _, first, second in differing),
        stage="forward",
        ranks=ranks,
        evidence={
            "part": kind,
            "position_in_sample": number,
            "sample": index,
            "digests": {f"rank {visit.rank}": visit.parts[number] for visit in (one, two)},
            "comparisons": compared,
            "differing": part.cross_differ,
        },
        cause=cause,
        fix=fix,
    )


_CAUSES = {
    "i": (
        "labels are mapped to numbers in another order in each process: a set of texts has another order in each, and "
        "so has a list of folders that is not sorted",
        "Sort the names of the classes before you number them, or save the mapping once and load it on every rank.",
    ),
    "I": (
        "each process encodes the samples with a table of its own, such as a vocabulary built from a set",
        "Build the vocabulary in a fixed order (sorted), or save it once and load it on every rank.",
    ),
    "f": (
        "each rank prepares or stores the samples in its own way: other statistics, caches or copies of the files",
        "Nothing, if each rank keeps augmented copies on purpose. Otherwise prepare the samples in the same way on "
        "every rank.",
    ),
}
