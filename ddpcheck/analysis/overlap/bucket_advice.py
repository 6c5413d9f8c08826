"""Bucket size advice: simulates other bucket sizes with measured gradient and reduction times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod, sqrt
from statistics import median, stdev

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.analysis.overlap.collector import ProfileCollector
from ddpcheck.analysis.overlap.link_model import (
    Bucket,
    GlooLink,
    Gradient,
    LinkModel,
    ObservedReduction,
    fitted,
    laid_out,
)
from ddpcheck.analysis.overlap.model import BucketAdvice, BucketLayout, BucketOverlap
from ddpcheck.records.kinds.timing import ReadyRecord

MIB = 1 << 20
_CAPS = [
    round(size * MIB)
    for size in (0.25, 0.5, 1, 2, 4, 8, 12, 16, 25, 32, 50, 64, 100, 128, 200, 256, 400, 512)
]
# Minimum number of backwards.
LEAST_BACKWARDS = 2
# Maximum relative error of the fitted link, and of the simulated current layout.
MOST_ERROR = 0.3
# Limit of the simulation time.
MOST_GLOO_BUCKETS = 500
# Sizes far below the measured ones would depend on the latency alone.
_BELOW_SEEN = 4
# Layouts within this share of the backward are equivalent; the one with the fewest buckets is used.
_ABOUT_AS_WELL = 0.01
# Minimum gain of a separate size of the first bucket.
_WORTH_A_SECOND_SIZE = 0.03
_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
}


def bucket_advice(
    attempt: Attempt, buckets: Sequence[BucketOverlap], one_by_one: bool, step_ns: int
) -> BucketAdvice | None:
    """None where something is missing, or where the simulation does not reproduce what was measured.

    Reductions run one by one on a device's stream; otherwise they are gloo's.
    """
    if len(attempt.collector(ProfileCollector).ready) != 1:
        # Several modules share one link, and their buckets cannot be separated.
        return None
    ((module, by_rank),) = attempt.collector(ProfileCollector).ready.items()
    backwards = _in_common(by_rank)
    if len(backwards) < LEAST_BACKWARDS or len(by_rank) < len(module[0]) or len(module[0]) < 2:
        return None
    gradients = _gradients(attempt, module, by_rank, backwards)
    per_step = len(backwards) // len({each.step for each in by_rank[min(by_rank)]} or {0})
    limits = by_rank[min(by_rank)][0].limits
    if not gradients or not limits or per_step < 1:
        return None
    as_is = laid_out(gradients, limits)
    if not _as_seen([each.bytes for each in as_is] * per_step, buckets):
        return None
    if not one_by_one and len(as_is) > MOST_GLOO_BUCKETS:
        return None
    kind = LinkModel(0, 0) if one_by_one else GlooLink(0, 0, ranks=len(module[0]))
    fit = fitted(kind, _seen(buckets, as_is))
    if fit is None or fit.error > MOST_ERROR:
        return None
    link = fit.link
    now = _layout(gradients, limits, link)
    measured = round(median(max(each[n].done_us for each in _numbered(by_rank)) for n in backwards) * 1000)
    if abs(now.backward_ns - measured) > MOST_ERROR * measured:
        return None
    tried = _tried(gradients, link, min(each.bytes or 0 for each in buckets))
    best = _best(now, tried)
    return BucketAdvice(
        module=attempt.number(module),
        measured_ns=measured,
        now=now,
        best=best,
        tried=tuple(each for each in tried if each.first_bytes == each.cap_bytes),
        step_ns=step_ns,
        gain_ns=(now.backward_ns - best.backward_ns) * per_step,
        latency_ns=round(link.latency_ns),
        bandwidth_gbps=round(1 / link.ns_per_byte, 3),
    )


def _numbered(by_rank: Mapping[int, Sequence[ReadyRecord]]) -> list[dict[int, ReadyRecord]]:
    return [{record.number: record for record in records} for records in by_rank.values()]


def _in_common(by_rank: Mapping[int, Sequence[ReadyRecord]]) -> list[int]:
    """Backwards in the traces of all ranks, with the same gradients."""
    ranks = _numbered(by_rank)
    common = set.intersection(*(set(each) for each in ranks)) if ranks else set()
    return sorted(n for n in common if len({tuple(sorted(each[n].order)) for each in ranks}) == 1)


def _gradients(
    attempt: Attempt,
    module: ModuleKey,
    by_rank: Mapping[int, Sequence[ReadyRecord]],
    backwards: Sequence[int],
) -> list[Gradient]:
    """Gradients in the order of rank 0, by which DDP builds its buckets."""
    ranks = _numbered(by_rank)
    rows = next(iter(attempt.of_module(module).values())).latest[module].parameters
    after = [[dict(zip(each[n].order, each[n].after_us, strict=True)) for n in backwards] for each in ranks]
    gradients = []
    for index in ranks[0][backwards[-1]].order:
        _, dtype, shape, _ = rows[index]
        if dtype not in _BYTES:
            return []
        ready = max(median(times[index] for times in rank) for rank in after)
        gradients.append(Gradient(prod(shape) * _BYTES[dtype], dtype, round(ready * 1000)))
    return gradients


def _as_seen(sizes: Sequence[int], buckets: Sequence[BucketOverlap]) -> bool:
    """True if DDP's rule reproduces the measured buckets; hooks and old layouts do not follow it."""
    steps: dict[int, list[int | None]] = {}
    for each in sorted(buckets, key=lambda each: (each.step, each.bucket)):
        steps.setdefault(each.step, []).append(each.bytes)
    return bool(steps) and all(step == list(sizes) for step in steps.values())


def _seen(buckets: Sequence[BucketOverlap], as_is: Sequence[Bucket]) -> list[ObservedReduction]:
    """Reduction time of each bucket from the last arrival to the end on all ranks; medians over backwards."""
    took: dict[int, list[int]] = {}
    for each in buckets:
        arrived = max(part.start_ns for part in each.ranks)
        took.setdefault(each.bucket % len(as_is), []).append(
            max(part.end_ns for part in each.ranks) - arrived
        )
    return [
        ObservedReduction(bucket, median(took[number]), _unsure(took[number]))
        for number, bucket in enumerate(as_is)
    ]


def _unsure(times: Sequence[int]) -> float:
    """The standard error of the median."""
    return stdev(times) / sqrt(len(times)) if len(times) > 1 else 0.0


def _layout(gradients: Sequence[Gradient], limits: Sequence[int], link: LinkModel) -> BucketLayout:
    buckets = laid_out(gradients, limits)
    # DDP starts buckets in order: an incomplete one delays those after it.
    end = max(link.finish(buckets), max(each.ready_ns for each in gradients))
    return BucketLayout(limits[0], limits[-1], len(buckets), round(end))


def _tried(gradients: Sequence[Gradient], link: LinkModel, smallest_seen: int) -> list[BucketLayout]:
    total = sum(each.bytes for each in gradients)
    caps = [cap for cap in _CAPS if cap * _BELOW_SEEN >= smallest_seen]
    caps = [cap for cap in caps if cap < total] + [cap for cap in caps if cap >= total][:1]
    pairs = [(first, cap) for cap in caps for first in caps if first <= cap]
    return [_layout(gradients, [*dict.fromkeys(pair)], link) for pair in pairs]


def _best(now: BucketLayout, tried: Sequence[BucketLayout]) -> BucketLayout:
    """The simplest layout that is equivalent to the best; one size is preferred to two."""
    one_size = _fewest([each for each in tried if each.first_bytes == each.cap_bytes] or [now])
    best = _fewest(tried or [now])
    clearly = one_size.backward_ns - best.backward_ns > _WORTH_A_SECOND_SIZE * one_size.backward_ns
    chosen = best if clearly else one_size
    return chosen if chosen.backward_ns * (1 + _ABOUT_AS_WELL) < now.backward_ns else now


def _fewest(layouts: Sequence[BucketLayout]) -> BucketLayout:
    bar = min(each.backward_ns for each in layouts) * (1 + _ABOUT_AS_WELL)
    return min(
        (each for each in layouts if each.backward_ns <= bar),
        key=lambda each: (each.buckets, each.backward_ns, -each.cap_bytes),
    )
