"""DDP402: the others wait for a rank that is late, step after step."""

from __future__ import annotations

from typing import Any

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.hardware.throttling import Throttling, throttled
from ddpcheck.analysis.timing.model import Straggler, TimeTable
from ddpcheck.analysis.timing.straggler import KEEPS_MEMORY, faults_memory_in, lacks_processors
from ddpcheck.formatting import name_ranks

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
KEEP_MEMORY = (
    f"Have glibc keep the memory it has: {KEEPS_MEMORY} in the environment of all ranks. Or preload another "
    "allocator (jemalloc, tcmalloc)."
)
COMPUTING = ("forward", "backward", "optimizer")
COOLER = (
    "Look at that GPU's cooling, power supply and power limit (nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER), or "
    "take its node out of the job."
)


def find(case: RuleContext) -> list[Finding]:
    return [_finding(case, table, table.straggler) for table in case.time if table.straggler is not None]


def _finding(case: RuleContext, table: TimeTable, late: Straggler) -> Finding:
    busy_host, refaults = lacks_processors(late), faults_memory_in(late)
    slowed = throttled(case.nodes, late.ranks, table.group) if late.part in COMPUTING else None
    who = name_ranks(late.ranks)
    its = "Its" if len(late.ranks) == 1 else "Their"
    hosts = _whole_hosts(case, late.ranks)
    where = f" ({_all_of(hosts)})" if hosts else ""
    told = [row for row in table.ranks if row.rank in late.ranks][: MOST_TOLD // 2]
    told += [row for row in table.ranks if row.rank not in late.ranks][: MOST_TOLD - len(told)]
    return case.finding(
        "DDP402",
        f"The other ranks wait {_ms(late.cost_us)} longer for {who}{where} in each step, {100 * late.share:.0f} % of "
        f"{_ms(table.step_us)} (in {late.steps_late} of {table.steps} steps). {its} {_part(late.part)} takes "
        f"{_ms(late.own_us)}, that of the others {_ms(late.others_us)}.",
        # What the host and its C library do is nothing that the job does wrong.
        severity=Severity.NOTE if (busy_host or refaults) and slowed is None else Severity.WARNING,
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
            "wait_ms": {str(row.rank): _milli(row.parts["wait"].median_us) for row in told},
            **({"hosts": list(hosts)} if hosts else {}),
            **({} if slowed is None else {"throttled": _evidence(slowed)}),
        },
        cause=_cause(late, slowed),
        fix=_fix(late, slowed),
    )


def _whole_hosts(case: RuleContext, late: tuple[int, ...]) -> tuple[str, ...]:
    """The hosts that the late ranks are, where they are all ranks of some hosts and there are others."""
    everyone: dict[str, set[int]] = {}
    for number, rank in case.attempt.ranks.items():
        everyone.setdefault(rank.header.host, set()).add(number)
    whole = [host for host, ranks in sorted(everyone.items()) if ranks <= set(late)]
    is_all = set(late) == {rank for host in whole for rank in everyone[host]}
    return tuple(whole) if is_all and len(whole) < len(everyone) else ()


def _all_of(hosts: tuple[str, ...]) -> str:
    return f"all of {hosts[0]}" if len(hosts) == 1 else f"all of {len(hosts)} hosts, {hosts[0]} first"


def _fix(late: Straggler, slowed: Throttling | None) -> str:
    if slowed is not None:
        return COOLER
    if lacks_processors(late):
        return MORE_PROCESSORS
    return KEEP_MEMORY if faults_memory_in(late) else FIX[late.part]


def _cause(late: Straggler, slowed: Throttling | None) -> str:
    if slowed is None and lacks_processors(late):
        return NO_PROCESSOR
    if slowed is None and faults_memory_in(late):
        return (
            f"page faults: in each step it takes {late.faults:,} pages more from the system than the others do, and "
            f"gives them back; the kernel works {_ms(late.kernel_us or 0)} longer for it"
        )
    if slowed is None:
        return CAUSE[late.part]
    reasons = ", ".join(f"{reason} in {100 * share:.0f} %" for reason, share in slowed.reasons.items())
    clocks = ""
    if slowed.clock is not None and slowed.others_clock is not None:
        clocks = f"; it ran at {slowed.clock:.0f} MHz, the others at {slowed.others_clock:.0f}"
    return f"throttling: its GPU ({', '.join(slowed.gpus)}) had its clocks held down ({reasons} of the samples{clocks})"


def _evidence(slowed: Throttling) -> dict[str, Any]:
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
