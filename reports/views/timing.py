"""Step time: mean step by phase, delays and scaling; overlap of communication in profiled steps; start-up by stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from ddpcheck.analysis.overlap.model import BucketOverlap, Overlap, RankOverlap
from ddpcheck.analysis.report import Report
from ddpcheck.analysis.timing.model import CrossCheck, RankTime, Refaults, Scaling, Straggler, TimeTable
from ddpcheck.analysis.timing.table import KEEPS_MEMORY
from ddpcheck.formatting import (
    name_ranks,
    optional_size_text,
    percent_text,
    rank_ranges,
    rate_text,
    seconds_text,
    size_text,
    time_text,
)
from ddpcheck.reports.views.table import Column, Row, Table, known, numbers, row
from ddpcheck.traces.model import Shares

if TYPE_CHECKING:
    from ddpcheck.analysis.startup.table import StartupTable

# Phase, the short label for a terminal, and the label where there is room.
PHASES = (
    ("data", "data", "data loading"),
    ("forward", "fwd", "forward"),
    ("backward", "bwd", "backward"),
    ("optimizer", "opt", "optimizer"),
    ("other", "other", "other"),
    ("wait", "wait", "communication and waiting"),
)
_WORK = tuple(phase for phase, _, _ in PHASES if phase != "wait")
# Where the name of a phase would not make a sentence.
_IN_SENTENCE = {"data": "data loading", "other": "code outside forward, backward and optimizer"}


@dataclass(frozen=True)
class StepTimeView:
    """The step times of ranks that synchronise with each other."""

    table: Table
    # " of ranks 0-3" where the job has several groups of ranks.
    suffix: str
    summary: str
    # By rank: the mean of each phase in ms, in the order of PHASES, and the mean wait.
    phases_ms: Mapping[int, tuple[float, ...]]
    # By rank: how much longer than the median rank each phase of WORK takes, in ms; medians over steps.
    delays_ms: Mapping[int, tuple[float, ...]]
    median_step_ms: float
    delay_summary: str

    @property
    def longest_ms(self) -> float:
        return max(map(sum, self.phases_ms.values()), default=0.0)


def step_times(report: Report) -> list[StepTimeView]:
    """One for each group of ranks that synchronise with each other."""
    tables = [table for table in report.time if table.ranks]
    return [_step_times(table, len(report.time) > 1) for table in tables]


def work_phases() -> tuple[str, ...]:
    """The phases in which a rank works, in the order of `delays_ms`."""
    return _WORK


def milliseconds(value: float) -> str:
    """Three significant digits at least."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _step_times(times: TimeTable, several: bool) -> StepTimeView:
    phases = {rank.rank: _phases(rank) for rank in times.ranks}
    delays = _delays(times)
    latest = max(delays, key=lambda rank: sum(delays[rank]))
    return StepTimeView(
        table=_table(times, several, phases),
        suffix=f" of {name_ranks(times.group)}" if several else "",
        summary=_summary(times),
        phases_ms=phases,
        delays_ms=delays,
        median_step_ms=times.step_us / 1000,
        delay_summary=(
            f"Rank {latest} has the largest delay: {milliseconds(sum(delays[latest]))} ms per step over all phases."
        ),
    )


def _table(times: TimeTable, several: bool, phases: Mapping[int, tuple[float, ...]]) -> Table:
    columns = (
        Column("rank"),
        Column("step", number=True),
        *(Column(short, title, number=True) for _, short, title in PHASES),
    )
    waits = {rank.rank: rank.parts["wait"].median_us for rank in times.ranks}
    usual = median(waits.values())
    rows = tuple(_row(rank, phases[rank.rank], abs(waits[rank.rank] - usual)) for rank in times.ranks)
    group = f", {name_ranks(times.group)}" if several else ""
    pauses = f", {times.pauses} with a pause excluded" if times.pauses else ""
    return Table(
        "Step time",
        columns,
        rows,
        subtitle=f"ms, mean of {times.steps} steps{group}{pauses}, without ddpcheck's own time",
        notes=tuple(_notes(times)),
        noun="ranks",
    )


def _row(rank: RankTime, phases: tuple[float, ...], weight: float) -> Row:
    step = milliseconds(rank.step.mean_us / 1000)
    return row([rank.rank, step, *map(milliseconds, phases)], weight, [rank.rank])


def _phases(rank: RankTime) -> tuple[float, ...]:
    return tuple(rank.parts[phase].mean_us / 1000 for phase, _, _ in PHASES)


def _delays(times: TimeTable) -> dict[int, tuple[float, ...]]:
    usual = {phase: median(rank.parts[phase].median_us for rank in times.ranks) for phase in _WORK}
    return {
        rank.rank: tuple(round((rank.parts[phase].median_us - usual[phase]) / 1000, 4) for phase in _WORK)
        for rank in times.ranks
    }


def _summary(times: TimeTable) -> str:
    text = f"The median step takes {milliseconds(times.step_us / 1000)} ms."
    straggler = times.straggler
    if straggler is None:
        return text
    verb = "is a straggler" if len(straggler.ranks) == 1 else "are stragglers"
    phase, cost = _phase_and_cost(straggler)
    return f"{text} {name_ranks(straggler.ranks).capitalize()} {verb} in {phase}: {cost} ms per step."


def straggler_text(times: TimeTable) -> str:
    """`rank 2 in data loading: 19.5 ms per step (44 %)`; empty where no rank delays the others."""
    straggler = times.straggler
    if straggler is None:
        return ""
    phase, cost = _phase_and_cost(straggler)
    share = f"{100 * straggler.share:.0f} % of the median step"
    return f"{name_ranks(straggler.ranks)} in {phase}: {cost} ms per step ({share})"


def _phase_and_cost(straggler: Straggler) -> tuple[str, str]:
    phase = _IN_SENTENCE.get(straggler.part, straggler.part)
    return phase, milliseconds(straggler.cost_us / 1000)


def _notes(times: TimeTable) -> list[str]:
    notes = [] if times.refaults is None else [_refaults(times.refaults)]
    if len(times.ranks) > 1:
        notes += _scaling(times.scaling)
        notes += [] if times.cross_check is None else [_cross_check(times.cross_check)]
    return notes


def _refaults(refaults: Refaults) -> str:
    return (
        f"Up to {refaults.faults:,} page faults per step, {100 * refaults.share:.0f} % of the step in the kernel: "
        f"memory is released and allocated again in every step. With {KEEPS_MEMORY} glibc keeps it."
    )


def step_shares(scaling: Scaling) -> str:
    """What the mean step consists of, over all ranks."""
    parts = (
        ("compute", scaling.compute),
        ("data", scaling.data),
        ("other", scaling.other),
        ("exposed comm", scaling.exposed_communication),
        ("waiting", scaling.waiting_for_stragglers),
    )
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in parts)


def _scaling(scaling: Scaling) -> list[str]:
    return [
        f"Mean step: {step_shares(scaling)}",
        f"Scaling efficiency {100 * scaling.efficiency:.0f} % ({scaling.speed_up:.2f}x one rank)",
    ]


def _cross_check(check: CrossCheck) -> str:
    own, ddp = milliseconds(check.wait_us / 1000), milliseconds(check.ddp_wait_us / 1000)
    return f"Cross-check: mean wait {own} ms, by DDP's own logger {ddp} ms"


@dataclass(frozen=True)
class ExposedMedians:
    """Medians over the profiled steps of means over ranks, in nanoseconds."""

    steps: int
    step_ns: int
    transfer_ns: int
    wait_ns: int
    # Of each step's own time, as in DDP401.
    transfer_share: float
    wait_share: float


def exposed_medians(overlap: Overlap | None) -> ExposedMedians | None:
    """None if no profiled step could be compared across ranks."""
    steps = [step for step in overlap.steps if step.took_ns > 0] if overlap is not None else []
    if not steps:
        return None
    return ExposedMedians(
        len(steps),
        round(median(step.took_ns for step in steps)),
        round(median(step.exposed_transfer_ns for step in steps)),
        round(median(step.exposed_wait_ns for step in steps)),
        median(step.exposed_transfer_ns / step.took_ns for step in steps),
        median(step.exposed_wait_ns / step.took_ns for step in steps),
    )


_COLUMNS = (
    Column("rank"),
    Column("compute", number=True, detail=True),
    Column("comm", "communication", number=True),
    Column("hidden", "hidden, of communication", number=True),
    Column("exposed", number=True),
    Column("transfer", "exposed transfer", number=True, detail=True),
    Column("wait", "exposed wait", number=True),
    Column("idle", number=True, detail=True),
    Column("last", "last to arrive", number=True),
)


@dataclass(frozen=True)
class ProfiledOverlap:
    """The profiled steps; `ranks` has no rows where no trace could be used."""

    ranks: Table
    buckets: Table
    shares: dict[int, Shares]

    @property
    def longest_ns(self) -> int:
        return max((each.span_ns for each in self.shares.values()), default=0)


def profiled_overlap(report: Report) -> ProfiledOverlap | None:
    """None if no step was profiled."""
    overlap = report.overlap
    if overlap is None:
        return None
    steps = max(len(overlap.steps) or overlap.end_step - overlap.first_step, 1)
    ranks = Table(
        _title(overlap),
        _COLUMNS,
        tuple(_rank_row(rank, steps) for rank in overlap.ranks),
        subtitle=_subtitle(overlap),
        notes=overlap.left_out,
        noun="ranks",
    )
    columns = (
        Column("step"),
        *numbers(("bucket", "size", "transfer", "skew", "last rank", "bus bandwidth")),
    )
    buckets = Table("Buckets", columns, tuple(map(_bucket_row, overlap.buckets)), noun="reductions")
    return ProfiledOverlap(ranks, buckets, {rank.rank: _shares(rank) for rank in overlap.ranks})


def _title(overlap: Overlap) -> str:
    own = " (profile of the training script)" if overlap.source == "user" and overlap.ranks else ""
    last = overlap.end_step - 1
    if last < overlap.first_step or not overlap.ranks:
        return f"Overlap{own}"
    steps = f"steps {overlap.first_step}-{last}" if last > overlap.first_step else f"step {last}"
    return f"Overlap in {steps}{own}"


def _subtitle(overlap: Overlap) -> str:
    if not overlap.steps:
        return "mean per step" if overlap.ranks else ""
    took = sum(step.took_ns for step in overlap.steps) // len(overlap.steps)
    return f"mean per step; a step takes {time_text(took)}"


def _rank_row(rank: RankOverlap, steps: int) -> Row:
    return row(
        [
            rank.rank,
            time_text(rank.compute_ns // steps),
            time_text(rank.comm_ns // steps),
            percent_text(rank.overlap_pct),
            time_text(rank.exposed_ns // steps),
            _per_step(rank.exposed_transfer_ns, steps),
            _per_step(rank.exposed_wait_ns, steps),
            time_text(rank.idle_ns // steps),
            None if rank.last_arrivals is None else f"{rank.last_arrivals}x",
        ],
        weight=rank.exposed_ns,
        ranks=[rank.rank],
    )


def _per_step(nanoseconds: int | None, steps: int) -> str | None:
    return None if nanoseconds is None else time_text(nanoseconds // steps)


def _shares(rank: RankOverlap) -> Shares:
    return Shares(
        span_ns=rank.span_ns,
        comm_ns=rank.comm_ns,
        compute_ns=rank.compute_ns,
        overlap_ns=rank.overlap_ns,
        exposed_ns=rank.exposed_ns,
        copy_ns=rank.copy_ns,
        idle_ns=rank.idle_ns,
    )


def _bucket_row(bucket: BucketOverlap) -> Row:
    return row(
        [
            f"step {bucket.step}",
            bucket.bucket,
            optional_size_text(bucket.bytes) or None,
            time_text(bucket.transfer_ns) or None,
            time_text(bucket.skew_ns) or None,
            bucket.last_rank,
            rate_text(bucket.busbw_gbps) or None,
        ]
    )


# A smaller model starts in a time that says nothing about its weights.
_LEAST_BYTES = 10_000_000
# Key in report.json, the label for a terminal, and the label where there is room; in the order they happen.
STAGES = (
    ("interpreter", "python", "Python start"),
    ("torch", "torch", "import torch"),
    ("group", "group", "process group"),
    ("load", "load", "read weights"),
    ("copy", "copy", "copy to device"),
    ("script", "script", "other script code"),
    ("wrap", "wrap", "wrap in DDP"),
    ("batch", "batch", "first batch"),
    ("step", "step", "first step"),
)


def startup_table(report: Report) -> Table | None:
    """Slow ranks weigh most; None if no rank recorded its start."""
    startup = report.startup
    if startup is None or not startup["ranks"]:
        return None
    copied = bool(startup["copied_bytes"])
    columns = (
        Column("rank"),
        Column("host", detail=True),
        *(
            Column(label, title, number=True, detail=stage == "copy" and not copied)
            for stage, label, title in STAGES
        ),
        Column("read", "bytes read", number=True),
        Column("total", number=True),
    )
    return Table(
        "Start-up",
        columns,
        tuple(_startup_row(rank) for rank in startup["ranks"]),
        subtitle="s, slowest ranks" if len(startup["ranks"]) > 8 else "s",
        notes=tuple(filter(None, (startup["summary"], _transfers(startup)))),
        noun="ranks",
        total=startup.get("of") or len(startup["ranks"]),
        minor=max(startup["broadcast_bytes"], startup["loaded_bytes"]) < _LEAST_BYTES,
    )


def node_reads_table(report: Report) -> Table | None:
    """What each node read; None for a single node."""
    nodes = (report.startup.get("nodes") or []) if report.startup else []
    if len(nodes) < 2:
        return None
    columns = (
        Column("host"),
        Column("ranks"),
        Column("read", number=True),
        Column("from storage", number=True),
        Column("read by several ranks", number=True),
    )
    rows = tuple(
        row(
            [
                node["host"],
                rank_ranges(node["ranks"]),
                size_text(node["loaded_bytes"]),
                size_text(node["storage_bytes"]),
                size_text(node["repeated_bytes"]),
            ]
        )
        for node in nodes
    )
    return Table("Bytes read by node", columns, rows, noun="nodes")


def startup_summary(startup: StartupTable) -> str:
    """The summary, with the slowest rank."""
    totals = [rank["total"] for rank in startup["ranks"] if rank["total"] is not None]
    slowest = f"The slowest rank needed {max(totals):.2f} s to the end of its first step." if totals else ""
    return " ".join(filter(None, (startup["summary"], slowest)))


def _startup_row(rank: Mapping[str, Any]) -> Row:
    seconds = [known(rank.get(stage), "{:.2f}".format) for stage, _, _ in STAGES]
    read = size_text(rank["loaded_bytes"]) if rank["loaded_bytes"] else None
    total = known(rank["total"], "{:.2f}".format)
    values = [rank["rank"], rank["host"], *seconds, read, total]
    return row(values, weight=rank["total"] or 0.0, ranks=[rank["rank"]])


def _transfers(startup: StartupTable) -> str:
    sentences = []
    if startup["copied_bytes"]:
        rate = f" at {size_text(startup['copy_rate'])}/s" if startup["copy_rate"] else ""
        sentences.append(f"{size_text(startup['copied_bytes'])} were copied to devices{rate}.")
    if startup["broadcast_bytes"] and startup["broadcast_seconds"] is not None:
        rate = f" ({size_text(startup['broadcast_rate'])}/s)" if startup["broadcast_rate"] else ""
        took = seconds_text(startup["broadcast_seconds"])
        sentences.append(f"The broadcast of {size_text(startup['broadcast_bytes'])} took {took}{rate}.")
    return " ".join(sentences)
