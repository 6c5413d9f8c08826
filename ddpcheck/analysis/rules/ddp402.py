"""DDP402: the others wait for a rank that is late, step after step."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.case import Case
from ddpcheck.analysis.findings import Finding, Severity
from ddpcheck.analysis.hardware.held_down import HeldDown, held_down
from ddpcheck.analysis.step_time.result import Straggler, TimeTable
from ddpcheck.analysis.step_time.straggler import lacks_processors
from ddpcheck.analysis.step_time.table import time_tables
from ddpcheck.rank_ranges import name_ranks

MOST_TOLD = 16

CAUSE = {
    "data": "the data loader takes longer there to give a batch",
    "forward": "the forward takes longer there: more work, or a slower or busier device",
    "backward": "the backward takes longer there: more work, or a slower or busier device",
    "optimizer": "the optimizer's step takes longer there",
    "other": "the training loop does something there, outside of DDP and the optimizer, that takes time",
}
FIX = {
    "data": "Give the loader more workers or a larger prefetch_factor on that rank, and compare the storage, "
    "the files and the size of the samples it reads with the other ranks'.",
    "forward": "Compare what it computes (batch size, lengths, extra branches) and what it computes on (clock, "
    "temperature, other jobs on that host or device) with the other ranks.",
    "backward": "Compare what it computes (batch size, lengths, extra branches) and what it computes on (clock, "
    "temperature, other jobs on that host or device) with the other ranks.",
    "optimizer": "Compare the optimizer's parameters and settings, and the host and device it runs on, with the "
    "other ranks'.",
    "other": "Look for what only that rank does in the training loop: logging, printing, saving, metrics, "
    "preparing batches by hand. Do it less often, or beside the training.",
}
NO_PROCESSOR = "its training thread stood in line for a processor: the host has more to run than cores"
MORE_PROCESSORS = (
    "Run fewer ranks, loader workers or threads (OMP_NUM_THREADS) on that host, or give the job more cores."
)


COMPUTING = ("forward", "backward", "optimizer")
COOLER = (
    "Look at that GPU's cooling, power supply and power limit (nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER), or "
    "take its node out of the job."
)


def find(case: Case) -> list[Finding]:
    groups = [module[0] for module in case.modules()]
    tables = time_tables(case.attempt.clocks, groups)
    return [_finding(case, table, table.straggler) for table in tables if table.straggler is not None]


def _finding(case: Case, table: TimeTable, late: Straggler) -> Finding:
    busy_host = lacks_processors(late)
    slowed = held_down(case.nodes, late.ranks, table.group) if late.part in COMPUTING else None
    who = name_ranks(late.ranks)
    its = "Its" if len(late.ranks) == 1 else "Their"
    return case.finding(
        "DDP402",
        f"The other ranks wait {_ms(late.cost_us)} longer for {who} in each step, {100 * late.share:.0f} % of "
        f"{_ms(table.step_us)} (in {late.steps_late} of {table.steps} steps). {its} {_part(late.part)} takes "
        f"{_ms(late.own_us)}, that of the others {_ms(late.others_us)}.",
        severity=Severity.NOTE if busy_host and slowed is None else Severity.WARNING,
        stage=late.part,
        ranks=late.ranks,
        evidence={
            "excess_ms": {part: _milli(value) for part, value in late.excess_us.items()},
            "queued_ms": None if late.queued_us is None else _milli(late.queued_us),
            "wait_ms": {
                str(row.rank): _milli(row.parts["wait"].median_us) for row in table.ranks[:MOST_TOLD]
            },
            **({} if slowed is None else {"throttled": _evidence(slowed)}),
        },
        cause=_cause(late, slowed, busy_host),
        fix=COOLER if slowed is not None else MORE_PROCESSORS if busy_host else FIX[late.part],
    )


def _cause(late: Straggler, slowed: HeldDown | None, busy_host: bool) -> str:
    if slowed is None:
        return NO_PROCESSOR if busy_host else CAUSE[late.part]
    reasons = ", ".join(f"{reason} in {100 * share:.0f} %" for reason, share in slowed.reasons.items())
    clocks = ""
    if slowed.clock is not None and slowed.others_clock is not None:
        clocks = f"; it ran at {slowed.clock:.0f} MHz, the others at {slowed.others_clock:.0f}"
    return f"throttling: its GPU ({', '.join(slowed.gpus)}) had its clocks held down ({reasons} of the samples{clocks})"


def _evidence(slowed: HeldDown) -> dict[str, Any]:
    return {
        "gpus": list(slowed.gpus[:MOST_TOLD]),
        "reasons": dict(slowed.reasons),
        "mhz": None if slowed.clock is None else round(slowed.clock),
        "others_mhz": None if slowed.others_clock is None else round(slowed.others_clock),
    }


def _part(part: str) -> str:
    names = {"data": "wait for data", "optimizer": "optimizer step", "other": "code between the parts"}
    return names.get(part, part)


def _milli(microseconds: int) -> float:
    return round(microseconds / 1000, 3)


def _ms(microseconds: int) -> str:
    return f"{microseconds / 1000:.1f} ms"
