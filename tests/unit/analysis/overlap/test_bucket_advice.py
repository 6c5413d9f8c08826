"""DDP's bucket rule and the advice, against cases computed by hand and a known link."""

from __future__ import annotations

import pytest

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.overlap import bucket_advice as advice_of_buckets
from ddpcheck.analysis.overlap.bucket_advice import MIB, bucket_advice
from ddpcheck.analysis.overlap.collector import ProfileCollector
from ddpcheck.analysis.overlap.link_model import Bucket, GlooLink, Gradient, LinkModel, laid_out
from ddpcheck.analysis.overlap.model import BucketOverlap, BucketPart
from ddpcheck.records.kinds.modules import ModuleRecord
from ddpcheck.records.kinds.rank import RankHeader
from ddpcheck.records.kinds.timing import ReadyRecord

MS = 1_000_000


def gradients(*sizes: int, dtype: str = "float32") -> list[Gradient]:
    return [Gradient(size, dtype, number * MS) for number, size in enumerate(sizes)]


def test_a_bucket_is_closed_once_it_has_reached_its_limit() -> None:
    assert laid_out(gradients(4, 4, 4, 4), [8]) == [Bucket(8, MS), Bucket(8, 3 * MS)]
    # It may exceed the limit, and the last one holds what is left.
    assert laid_out(gradients(5, 9, 1), [8]) == [Bucket(14, MS), Bucket(1, 2 * MS)]


def test_the_first_limit_is_the_first_buckets() -> None:
    assert [each.bytes for each in laid_out(gradients(4, 4, 4, 4, 4), [4, 8])] == [4, 8, 8]


def test_types_have_buckets_of_their_own() -> None:
    mixed = [*gradients(4, dtype="float32"), *gradients(2, dtype="float16"), *gradients(4, dtype="float32")]
    assert [each.bytes for each in laid_out(mixed, [8])] == [8, 2]


class Job:
    """Ranks whose backwards and reductions follow a known link to the nanosecond."""

    def __init__(
        self,
        sizes_mib: list[float],
        gap_ms: float,
        limits: list[int],
        link: LinkModel,
        steps: int = 3,
        ranks: int = 2,
    ) -> None:
        self.attempt = Attempt("a")
        count = len(sizes_mib)
        rows = [[f"p{n}", "float32", [round(size * MIB / 4)], 1] for n, size in enumerate(sizes_mib)]
        # The last parameter's gradient comes first.
        order = list(reversed(range(count)))
        after = [round(n * gap_ms * 1000) for n in range(count)]
        ready = [
            Gradient(rows[index][2][0] * 4, "float32", at * 1000)
            for index, at in zip(order, after, strict=True)
        ]
        self.gradients, self.link = ready, link
        buckets = laid_out(ready, limits)
        times = link.reduce(buckets)
        done = round(max(times[-1][1], ready[-1].ready_ns) / 1000)
        for rank in range(ranks):
            header = RankHeader(rank, ranks, "node", 1, 1, "a", 0.0)
            self.attempt.feed(header, header)
            self.attempt.feed(header, ModuleRecord(0, "Net", list(range(ranks)), 0, rows, []))
            for step in range(steps):
                self.attempt.feed(header, ReadyRecord(0, step, step, 0, order, after, done, limits))
        self.buckets = [
            overlap(step, number, bucket.bytes, times[number])
            for step in range(steps)
            for number, bucket in enumerate(buckets)
        ]

    def backward_ns(self, limits: list[int]) -> float:
        """The time of another layout on the true link."""
        return max(self.link.finish(laid_out(self.gradients, limits)), self.gradients[-1].ready_ns)

    def advice(self) -> object:
        return bucket_advice(self.attempt, self.buckets, not isinstance(self.link, GlooLink), 500 * MS)


def overlap(step: int, number: int, size: int, times: tuple[float, float]) -> BucketOverlap:
    start, end = map(round, times)
    parts = tuple(BucketPart(rank, start, start, end, 0, end - start, 0) for rank in (0, 1))
    return BucketOverlap(step, number, size, end - start, 0, None, None, None, parts)


SLOW = LinkModel(latency_ns=1 * MS, ns_per_byte=10)
SLOW_GLOO = GlooLink(latency_ns=1 * MS, ns_per_byte=10)


@pytest.mark.parametrize("link", [SLOW, SLOW_GLOO])
def test_buckets_that_are_too_large(link: LinkModel) -> None:
    # Twelve gradients of 2 MiB, 30 ms apart: one at first, then all others together at the very end.
    job = Job([2] * 12, 30, [1 * MIB, 25 * MIB], link)
    advice = job.advice()
    assert advice is not None
    best = advice.best
    limits = [best.first_bytes, best.cap_bytes]
    assert (advice.now.buckets, best.first_bytes, best.cap_bytes) == (2, 2 * MIB, 2 * MIB)
    true_gain = job.backward_ns([1 * MIB, 25 * MIB]) - job.backward_ns(limits)
    assert advice.gain_ns == pytest.approx(true_gain, rel=0.1)
    assert advice.gain_ns > 150 * MS


def test_buckets_that_are_too_small() -> None:
    # Latency costs more than bytes: 40 buckets of 0.25 MiB and one of 1, all ready almost at once.
    job = Job([1] + [0.25] * 40, 0.1, [round(0.25 * MIB)], LinkModel(latency_ns=5 * MS, ns_per_byte=1))
    advice = job.advice()
    assert advice is not None
    assert advice.best.buckets < 5
    true_gain = job.backward_ns([round(0.25 * MIB)]) - job.backward_ns([advice.best.cap_bytes])
    assert advice.gain_ns == pytest.approx(true_gain, rel=0.1)


def test_two_buckets_of_gloo_that_overlap() -> None:
    # Nine gradients, then three: the second reduction begins in the first, so any latency would explain them.
    job = Job([0.5625] * 12, 120, [5 * MIB], GlooLink(latency_ns=3 * MS, ns_per_byte=170))
    advice = job.advice()
    assert advice is not None
    best = advice.best
    true_gain = job.backward_ns([5 * MIB]) - job.backward_ns([best.first_bytes, best.cap_bytes])
    assert advice.gain_ns == pytest.approx(true_gain, rel=0.1)
    assert best.buckets >= 6


def test_buckets_of_gloo_that_are_too_small() -> None:
    job = Job(
        [0.25] * 12 + [1] + [0.25] * 12 + [1],
        5,
        [round(0.25 * MIB)],
        GlooLink(latency_ns=80 * MS, ns_per_byte=170),
    )
    advice = job.advice()
    assert advice is not None
    best = advice.best
    assert best.buckets < advice.now.buckets / 2
    true_gain = job.backward_ns([round(0.25 * MIB)]) - job.backward_ns([best.first_bytes, best.cap_bytes])
    assert advice.gain_ns == pytest.approx(true_gain, rel=0.2)


def test_buckets_that_are_right_stay() -> None:
    advice = Job([2] * 12, 30, [2 * MIB, 4 * MIB], SLOW).advice()
    assert advice is not None
    assert advice.gain_ns < 0.05 * advice.now.backward_ns


def test_no_advice_where_buckets_are_not_those_of_the_rule() -> None:
    job = Job([2] * 12, 30, [1 * MIB, 25 * MIB], SLOW)
    job.buckets = [
        overlap(each.step, each.bucket, (each.bytes or 0) // 2, (0, MS)) for each in job.buckets
    ]  # a hook that halves the bytes
    assert job.advice() is None


def test_no_advice_where_the_simulation_misses_the_backward() -> None:
    job = Job([2] * 12, 30, [1 * MIB, 25 * MIB], SLOW)
    for records in next(iter(job.attempt.collector(ProfileCollector).ready.values())).values():
        records[:] = [ReadyRecord(**{**vars(each), "done_us": each.done_us * 2}) for each in records]
    assert job.advice() is None


def test_no_advice_from_a_single_backward_or_a_rank_that_is_missing() -> None:
    assert Job([2] * 12, 30, [1 * MIB, 25 * MIB], SLOW, steps=1).advice() is None
    job = Job([2] * 12, 30, [1 * MIB, 25 * MIB], SLOW)
    del next(iter(job.attempt.collector(ProfileCollector).ready.values()))[1]
    assert job.advice() is None


def test_no_advice_for_a_single_rank() -> None:
    assert Job([2] * 12, 30, [1 * MIB, 25 * MIB], SLOW_GLOO, ranks=1).advice() is None


def test_no_advice_where_gloo_has_too_many_buckets_to_simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job([2] * 12, 30, [1 * MIB, 25 * MIB], SLOW_GLOO)
    monkeypatch.setattr(advice_of_buckets, "MOST_GLOO_BUCKETS", 2)
    assert job.advice() is not None
    monkeypatch.setattr(advice_of_buckets, "MOST_GLOO_BUCKETS", 1)
    assert job.advice() is None
