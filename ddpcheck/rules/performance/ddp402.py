"""DDP402: a straggler slows every step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.hardware.samples import NodeSamples
from ddpcheck.analysis.hardware.statistics import GpuStatistics
from ddpcheck.analysis.timing.model import Straggler, TimeTable
from ddpcheck.analysis.timing.table import (
    KEEPS_MEMORY,
    LEAST_SPAN_US,
    faults_memory_in,
    lacks_processors,
    measured_us,
)
from ddpcheck.formatting import name_ranks
from ddpcheck.rules.rule import Need, Rule, first_sentence

# Minimum number of samples during the steps, and minimum share of throttled ones.
FEWEST_SAMPLES = 4
LEAST_SHARE = 0.5
# The others may be throttled as well, as under a power cap, but in at most half as many samples.
MOST_OF_OTHERS = 0.5
# Minimum ratio of the clocks.
MOST_OF_CLOCK = 0.97


@dataclass(frozen=True)
class Throttling:
    """GPUs of stragglers during the steps."""

    # Share of samples by reason, the maximum over the stragglers' GPUs.
    reasons: Mapping[str, float]
    # Host and index, as "node1:3".
    gpus: tuple[str, ...]
    # Mean clock in MHz of these GPUs and of the others; None if unknown.
    clock: float | None
    others_clock: float | None


@dataclass(frozen=True)
class _RankGpu:
    """A GPU that a rank's process uses."""

    name: str
    statistics: GpuStatistics

    @property
    def share(self) -> float:
        return max(self.statistics.throttling().values(), default=0.0)

    @property
    def clock(self) -> float | None:
        row = self.statistics.clock.row()
        return None if row is None else row["mean"]


def throttled(
    nodes: Sequence[NodeSamples], late: Collection[int], group: Collection[int]
) -> Throttling | None:
    """None if throttling is not the cause, or unknown for a rank of the group."""
    gpus_of_rank = {rank: _rank_gpus(nodes, rank) for rank in group}
    if not all(gpus_of_rank.values()):
        return None
    theirs = [gpu_of_rank for rank in late for gpu_of_rank in gpus_of_rank[rank]]
    others = [gpu_of_rank for rank in group if rank not in late for gpu_of_rank in gpus_of_rank[rank]]
    least = min((max(gpu_of_rank.share for gpu_of_rank in gpus_of_rank[rank]) for rank in late), default=0.0)
    if (
        least < LEAST_SHARE
        or max((gpu_of_rank.share for gpu_of_rank in others), default=1.0) > MOST_OF_OTHERS * least
    ):
        return None
    clock, usual = _clock(theirs), _clock(others)
    if clock is not None and usual is not None and clock > MOST_OF_CLOCK * usual:
        return None
    reasons: dict[str, float] = {}
    for gpu_of_rank in theirs:
        for reason, share in gpu_of_rank.statistics.throttling().items():
            reasons[reason] = max(share, reasons.get(reason, 0.0))
    return Throttling(reasons, tuple(sorted({gpu_of_rank.name for gpu_of_rank in theirs})), clock, usual)


def _rank_gpus(nodes: Sequence[NodeSamples], rank: int) -> list[_RankGpu]:
    gpus = []
    for node in nodes:
        indices = node.statistics.ranks.get(str(rank), {}).get("gpus", ())
        for index in indices:
            statistics = node.stepping[index] if index < len(node.stepping) else GpuStatistics()
            if statistics.count >= FEWEST_SAMPLES:
                gpus.append(_RankGpu(f"{node.host}:{node.gpu_index(index)}", statistics))
    return gpus


def _clock(gpus_of_rank: Sequence[_RankGpu]) -> float | None:
    clocks = [gpu_of_rank.clock for gpu_of_rank in gpus_of_rank if gpu_of_rank.clock is not None]
    return mean(clocks) if clocks else None


RULE = Rule(
    code="DDP402",
    severity=Severity.WARNING,
    title="A straggler slows every step",
    summary="a rank is a straggler: which rank, its cost per step, and whether data loading or compute causes it",
    needs=(Need.TIME,),
    headline=first_sentence,
)

_MOST_RANKS = 16

_CAUSES = {
    "data": "the data loader takes longer there to return a batch",
    "forward": "the forward takes longer there: more work, or a slower or busier device",
    "backward": "the backward takes longer there: more work, or a slower or busier device",
    "optimizer": "the optimizer step takes longer there",
    "other": "the training loop spends time there outside forward, backward and optimizer",
}
_FIXES = {
    "data": "Give the loader more workers or a larger prefetch_factor on that rank, and compare its storage, "
    "files and sample sizes with those of the other ranks.",
    "forward": "Compare its work (batch size, lengths, extra branches) and its device (clock, temperature, other "
    "jobs on that host or device) with the other ranks.",
    "backward": "Compare its work (batch size, lengths, extra branches) and its device (clock, temperature, other "
    "jobs on that host or device) with the other ranks.",
    "optimizer": "Compare the optimizer's parameters and settings, the host and the device with those of the "
    "other ranks.",
    "other": "Look for work that only this rank does in the training loop: logging, printing, saving, metrics, "
    "preparing batches. Do it less often, or in another thread or process.",
}
_NO_PROCESSOR = "its training thread waited for a processor: the host runs more threads than it has cores"
_PARTS = {
    "data": "waiting for data",
    "forward": "in forward",
    "backward": "in backward",
    "optimizer": "in the optimizer step",
    "other": "outside forward, backward and optimizer",
}
_MORE_PROCESSORS = (
    "Run fewer ranks, loader workers or threads (OMP_NUM_THREADS) on that host, or give the job more cores."
)
_KEEP_MEMORY = (
    f"Let glibc keep its memory: set {KEEPS_MEMORY} in the environment of all ranks. Or preload another "
    "allocator (jemalloc, tcmalloc)."
)
_COMPUTING = ("forward", "backward", "optimizer")
_COOLING = (
    "Check that GPU's cooling, power supply and power limit (nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER), or "
    "remove its node from the job."
)


def find(context: RuleContext) -> list[Finding]:
    return [
        _finding(context, table, table.straggler) for table in context.time if table.straggler is not None
    ]


def withheld(context: RuleContext) -> str:
    """Why a straggler could not have been found."""
    short = [table for table in context.time if len(table.ranks) > 1 and measured_us(table) < LEAST_SPAN_US]
    if not short or len(short) < len(context.time):
        return ""
    return f"only {measured_us(short[0]) / 1e6:.1f} s of steps were measured, {LEAST_SPAN_US / 1e6:g} s are needed"


def _finding(context: RuleContext, table: TimeTable, late: Straggler) -> Finding:
    busy_host, refaults = lacks_processors(late), faults_memory_in(late)
    throttling = throttled(context.nodes, late.ranks, table.group) if late.part in _COMPUTING else None
    several = len(late.ranks) > 1
    hosts = _all_ranks_of_hosts(context, late.ranks)
    where = f" ({_describe_hosts(hosts)})" if hosts else ""
    rows = [row for row in table.ranks if row.rank in late.ranks][: _MOST_RANKS // 2]
    rows += [row for row in table.ranks if row.rank not in late.ranks][: _MOST_RANKS - len(rows)]
    return context.finding(
        RULE,
        f"{name_ranks(late.ranks).capitalize()}{where} "
        f"{'are stragglers: they cost' if several else 'is a straggler: it costs'} {_ms(late.cost_us)} per step. "
        f"That is {100 * late.share:.0f} % of {_ms(table.step_us)}, in {late.steps_late} of {table.steps} steps. "
        f"{'They spend' if several else 'It spends'} {_ms(late.own_us)} {_PARTS[late.part]}, the other ranks "
        f"{_ms(late.others_us)}.",
        # The host and its C library cause this, not the job.
        severity=Severity.NOTE if (busy_host or refaults) and throttling is None else Severity.WARNING,
        stage=late.part,
        ranks=late.ranks,
        evidence={
            "excess_ms": {part: _milli(value) for part, value in late.excess_us.items()},
            "queued_ms": None if late.queued_us is None else _milli(late.queued_us),
            **(
                {"page_faults_more": late.faults, "kernel_ms_more": _milli(late.kernel_us)}
                if late.faults is not None and late.kernel_us is not None
                else {}
            ),
            "wait_ms": {str(row.rank): _milli(row.parts["wait"].median_us) for row in rows},
            **({"hosts": list(hosts)} if hosts else {}),
            **({} if throttling is None else {"throttled": _evidence(throttling)}),
        },
        cause=_cause(late, throttling),
        fix=_fix(late, throttling),
    )


def _all_ranks_of_hosts(context: RuleContext, late: tuple[int, ...]) -> tuple[str, ...]:
    """The hosts of the late ranks, if these are all ranks of some hosts and there are other hosts."""
    by_host: dict[str, set[int]] = {}
    for number, rank in context.attempt.ranks.items():
        by_host.setdefault(rank.header.host, set()).add(number)
    hosts = [host for host, ranks in sorted(by_host.items()) if ranks <= set(late)]
    covers_all = set(late) == {rank for host in hosts for rank in by_host[host]}
    return tuple(hosts) if covers_all and len(hosts) < len(by_host) else ()


def _describe_hosts(hosts: tuple[str, ...]) -> str:
    return f"all of {hosts[0]}" if len(hosts) == 1 else f"all of {len(hosts)} hosts, the first is {hosts[0]}"


def _fix(late: Straggler, throttling: Throttling | None) -> str:
    if throttling is not None:
        return _COOLING
    if lacks_processors(late):
        return _MORE_PROCESSORS
    return _KEEP_MEMORY if faults_memory_in(late) else _FIXES[late.part]


def _cause(late: Straggler, throttling: Throttling | None) -> str:
    if throttling is None and lacks_processors(late):
        return _NO_PROCESSOR
    if throttling is None and faults_memory_in(late):
        return (
            f"page faults: it allocates and frees {late.faults:,} more pages per step than the other ranks, which "
            f"costs {_ms(late.kernel_us or 0)} more time in the kernel"
        )
    if throttling is None:
        return _CAUSES[late.part]
    reasons = ", ".join(f"{reason} in {100 * share:.0f} %" for reason, share in throttling.reasons.items())
    clocks = ""
    if throttling.clock is not None and throttling.others_clock is not None:
        clocks = f"; it ran at {throttling.clock:.0f} MHz, the others at {throttling.others_clock:.0f} MHz"
    gpus = ", ".join(throttling.gpus)
    return f"throttling: the clocks of its GPU ({gpus}) were reduced ({reasons} of the samples{clocks})"


def _evidence(throttling: Throttling) -> dict[str, Any]:
    return {
        "gpus": list(throttling.gpus[:_MOST_RANKS]),
        "reasons": dict(throttling.reasons),
        "mhz": None if throttling.clock is None else round(throttling.clock),
        "others_mhz": None if throttling.others_clock is None else round(throttling.others_clock),
    }


def _milli(microseconds: int) -> float:
    return round(microseconds / 1000, 3)


def _ms(microseconds: int) -> str:
    return f"{microseconds / 1000:.1f} ms"
