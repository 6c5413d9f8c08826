"""Builds the report of a run folder."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.cost.collector import CostCollector, budget_setting
from ddpcheck.analysis.coverage import checks_of, environment_rows
from ddpcheck.analysis.data.collector import data_table
from ddpcheck.analysis.exit_status import summaries
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.hardware.machine import hardware_table, machine_of, traffic_table
from ddpcheck.analysis.memory.table import memory_table
from ddpcheck.analysis.network.connections import links_table
from ddpcheck.analysis.node_notes import read_notes, write_errors_by_attempt
from ddpcheck.analysis.overlap.build import overlap_or_why
from ddpcheck.analysis.report import AttemptSummary as AttemptSummary
from ddpcheck.analysis.report import RankStatus, RankSummary, Report, Verdict
from ddpcheck.analysis.run_reader import Progress, RunReader, read_description
from ddpcheck.analysis.sharding.mesh import merge_shards, parameters_of
from ddpcheck.analysis.startup.table import startup_table
from ddpcheck.analysis.step_coverage.model import Coverage
from ddpcheck.analysis.timeseries.build import build_timeseries, loss_timeseries
from ddpcheck.analysis.timeseries.lines import agreement_history, gradient_history
from ddpcheck.analysis.timing.table import time_tables
from ddpcheck.records.kinds.rank import FaultRecord, is_same_job
from ddpcheck.rules.job.ddp605 import failed_rule
from ddpcheck.rules.rule import Rule, in_report_order, rule_of

_JOB = "TORCHELASTIC_RUN_ID"
NO_END = "they have no end, and the launcher is gone"


def recovered_by(attempts: Sequence[Attempt], rows: Sequence[Sequence[RankSummary]]) -> list[int | None]:
    """For each attempt the number of the restart in which all ranks finished; None: there was none."""
    return [_recovered_by(number, attempts, rows) for number in range(len(attempts))]


def _recovered_by(
    number: int, attempts: Sequence[Attempt], rows: Sequence[Sequence[RankSummary]]
) -> int | None:
    for later in range(number + 1, len(attempts)):
        if not _restarts(attempts[later - 1], attempts[later]):
            return None
        if all(row.status is RankStatus.FINISHED for row in rows[later]):
            return later
    return None


def _restarts(earlier: Attempt, later: Attempt) -> bool:
    """Whether one torchrun launched both attempts, not another job in the same run."""
    if is_same_job(earlier.session, later.session):
        return True
    # Older versions of torchrun use a new store for every attempt.
    same_job = _jobs(earlier) == _jobs(later) != {""}
    return same_job and _restart(later) > _restart(earlier)


def _jobs(attempt: Attempt) -> set[str]:
    return {rank.header.environment.get(_JOB, "") for rank in attempt.ranks.values()}


def _restart(attempt: Attempt) -> int:
    return max((rank.header.restart for rank in attempt.ranks.values()), default=0)


def analyse_run(
    path: Path,
    *,
    course: bool = False,
    loss: bool = False,
    abandoned: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Read a stored run and build its report. `abandoned`: its launcher is gone, and has not recorded the end."""
    description = read_description(path)
    run = RunReader(path)
    return build_report(run, description, course=course, loss=loss, abandoned=abandoned, progress=progress)


def build_report(
    run: RunReader,
    description: dict[str, Any],
    *,
    course: bool = False,
    loss: bool = False,
    abandoned: bool = False,
    unwritten: Sequence[tuple[str, bytes]] = (),
    progress: Progress | None = None,
) -> Report:
    """Read the remaining records of a run and build its report.

    `course`: include time series, for reports that draw charts; `loss`: only that of the loss. `unwritten`: lines that
    the launcher could not write to its log, with the name of the log. `progress`: is called while records are read.
    """
    run.finish(progress)
    notes = read_notes(run.path, description, unwritten)
    exit_code = description.get("exit_code")
    exit_code = exit_code if isinstance(exit_code, int) else None
    over = "ended" in description
    attempts = run.ordered() or [Attempt("")]
    ranks = [summaries(attempt, number, notes, over) for number, attempt in enumerate(attempts)]
    restarts = recovered_by(attempts, ranks)
    unattributed = _faults_by_attempt(run.unattributed_faults, ranks)
    write_errors = write_errors_by_attempt(notes.write_errors, ranks)
    if abandoned:
        # These ranks were killed, or could not write: it is unknown whether their records are complete.
        for errors, rows in zip(write_errors, ranks, strict=True):
            errors |= {row.rank: NO_END for row in rows if row.status is RankStatus.RUNNING}
    machine = machine_of(run.path, attempts[-1])
    overlaps = [overlap_or_why(attempt, run.path) for attempt in attempts]
    times = [
        time_tables(attempt.step_times, [module[0] for module in attempt.modules()]) for attempt in attempts
    ]
    contexts = [
        RuleContext(
            attempt=attempt,
            number=number,
            folder=run.path,
            notes=notes,
            ranks=ranks[number],
            exit_code=exit_code,
            unattributed_faults=unattributed[number],
            write_errors=write_errors[number],
            recovered_by=restarts[number],
            traffic=machine.traffic if number == len(attempts) - 1 else None,
            links=machine.links if number == len(attempts) - 1 else None,
            nodes=tuple(machine.nodes) if number == len(attempts) - 1 else (),
            overlap=overlaps[number],
            time=times[number],
        )
        for number, attempt in enumerate(attempts)
    ]
    ignored = _ignored(description)
    findings = tuple(
        _ordered(
            [
                _as_note(f, ignored)
                for context in contexts
                for rule in in_report_order()
                for f in _findings(rule, context)
            ]
        )
    )
    last = attempts[-1]
    coverage = _coverage(contexts)
    overlap = next((overlap for overlap in reversed(overlaps) if overlap is not None), None)
    return Report(
        verdict=_verdict(
            findings,
            exit_code,
            bool(description.get("stopped")),
            _is_partial(contexts) or (coverage is not None and not coverage.complete),
        ),
        world_size=last.world_size,
        steps=max((last.steps(rank) for rank in last.ranks), default=0),
        command=_command(description),
        exit_code=exit_code,
        findings=findings,
        attempts=tuple(
            AttemptSummary(
                number=context.number,
                world_size=context.attempt.world_size,
                steps=max((context.attempt.steps(rank) for rank in context.attempt.ranks), default=0),
                ranks=context.ranks,
            )
            for context in contexts
            if context.attempt.ranks
        ),
        checks=checks_of(last),
        coverage=coverage,
        not_judged=_not_judged(contexts[-1], findings),
        data=data_table(last),
        hardware=hardware_table(machine.nodes),
        traffic=traffic_table(machine.traffic),
        links=links_table(machine.links, times[-1]),
        time=times[-1],
        cost=last.collector(CostCollector).table(budget_setting(description)),
        memory=memory_table(last),
        startup=startup_table(last),
        overlap=overlap,
        agreement=agreement_history(last),
        gradients=gradient_history(last),
        environment=environment_rows(last),
        hosts=last.hosts(),
        course=build_timeseries(last, machine.nodes, overlaps[-1], findings, machine.links, run.path)
        if course
        else loss_timeseries(last)
        if loss
        else None,
        run=_about(run, description),
    )


def _findings(rule: Rule, context: RuleContext) -> list[Finding]:
    """An error in a rule is reported as a finding; other rules are not affected."""
    try:
        return merge_shards(rule.find(context))
    except Exception as error:
        return [failed_rule(context, rule.code, error)]


def _ignored(description: dict[str, Any]) -> Mapping[str, str]:
    """The findings that the project wants to see as notes, and why."""
    config = description.get("config")
    ignored = config.get("ignore") if isinstance(config, dict) else None
    return ignored if isinstance(ignored, dict) else {}


def _as_note(finding: Finding, ignored: Mapping[str, str]) -> Finding:
    """A finding that the project ignores is a note that repeats the reason."""
    rule = rule_of(finding.code)
    if finding.code not in ignored or rule is None or not rule.can_be_ignored:
        return finding
    reason = str(ignored[finding.code]).rstrip(".")
    message = f"{finding.message} Ignored in pyproject.toml: {reason}."
    return replace(finding, severity=Severity.NOTE, message=message)


def _not_judged(context: RuleContext, findings: tuple[Finding, ...]) -> dict[str, str]:
    """By code, why the last attempt was not judged; an error there is an error of `find` too, which is reported."""
    codes = {finding.code for finding in findings}
    reasons: dict[str, str] = {}
    for rule in in_report_order():
        with contextlib.suppress(Exception):
            reason = "" if rule.code in codes else rule.withheld(context)
            if reason:
                reasons[rule.code] = reason
    return reasons


def _ordered(findings: list[Finding]) -> list[Finding]:
    """By severity, then in the order of the rules, which is from cause to effect."""
    return sorted(findings, key=lambda finding: -finding.severity.weight)


def _faults_by_attempt(
    unattributed: list[FaultRecord], ranks: list[tuple[RankSummary, ...]]
) -> list[tuple[FaultRecord, ...]]:
    """Faults that were recorded outside of a rank's file: before the process was known as a rank, or instead of it.

    Each is assigned to the attempt in which the process is a rank, or in which its rank is missing.
    """
    by_pid = {row.pid: (number, row.rank) for number, rows in enumerate(ranks) for row in rows if row.pid}
    missing = [{row.rank for row in rows if row.status is RankStatus.MISSING} for rows in ranks]
    assigned: list[list[FaultRecord]] = [[] for _ in ranks]
    for fault in unattributed:
        if fault.pid in by_pid:
            number, rank = by_pid[fault.pid]
            assigned[number].append(replace(fault, rank=rank))
            continue
        number = next(
            (n for n, ranks_missing in enumerate(missing) if fault.rank in ranks_missing), len(ranks) - 1
        )
        missing[number].discard(-1 if fault.rank is None else fault.rank)
        assigned[number].append(fault)
    return [tuple(faults) for faults in assigned]


def _is_partial(contexts: list[RuleContext]) -> bool:
    """Whether a rank of the last attempt has no records."""
    last = contexts[-1]
    return not last.attempt.ranks or bool(last.with_status(RankStatus.MISSING))


def _coverage(contexts: list[RuleContext]) -> Coverage | None:
    """Of the first attempt that is not complete and was not repeated by a restart, else of the last one."""
    reported = [context for context in contexts if context.attempt.ranks]
    kept = [context.coverage() for context in reported if context.recovered_by is None]
    incomplete = next((coverage for coverage in kept if not coverage.complete), None)
    return incomplete or (reported[-1].coverage() if reported else None)


def _verdict(findings: tuple[Finding, ...], exit_code: int | None, stopped: bool, partial: bool) -> Verdict:
    if exit_code not in (None, 0) and not stopped:
        return Verdict.FAILED
    severities = {finding.severity for finding in findings if not _is_incomplete(finding)}
    if Severity.ERROR in severities:
        return Verdict.FINDINGS
    if partial or any(map(_is_incomplete, findings)):
        return Verdict.INCOMPLETE
    return Verdict.FINDINGS if Severity.WARNING in severities else Verdict.OK


def _is_incomplete(finding: Finding) -> bool:
    rule = rule_of(finding.code)
    return rule is not None and rule.incomplete


def _command(description: dict[str, Any]) -> tuple[str, ...]:
    command = description.get("command")
    return tuple(map(str, command)) if isinstance(command, list) else ()


def _about(run: RunReader, description: dict[str, Any]) -> dict[str, Any]:
    headers = [rank.header for attempt in run.attempts.values() for rank in attempt.ranks.values()]
    return {
        "path": str(run.path),
        "name": description.get("name", run.path.name),
        "id": description.get("id", run.path.name),
        "started": description.get("started"),
        "seconds": description.get("seconds"),
        "ddpcheck": description.get("ddpcheck"),
        "torch": sorted({header.torch for header in headers}),
        "parameters": _parameters(run),
        "every": _every(description),
        "hosts": sorted({header.host for header in headers}),
        "unreadable_lines": sum(rank.bad_lines for a in run.attempts.values() for rank in a.ranks.values()),
        "files_without_header": run.files_without_header,
        # Marks folders that a generator made for tests and benchmarks.
        **({"folded": folded} if (folded := _folded(run)) else {}),
        **({"interrupted": True} if description.get("interrupted") is True else {}),
        **({"synthetic": description["synthetic"]} if description.get("synthetic") else {}),
    }


def _folded(run: RunReader) -> list[list[int]]:
    """First and last steps of the last attempt that are folded in the records."""
    attempts = run.ordered()
    run.folds.refresh()
    folded: list[list[int]] = []
    for fold in run.folds.of(attempts[-1].session) if attempts else ():
        if folded and fold.first <= folded[-1][1] + 1:
            folded[-1][1] = max(folded[-1][1], fold.end - 1)
        else:
            folded.append([fold.first, fold.end - 1])
    return folded


def _parameters(run: RunReader) -> int:
    """Number of parameters of all modules of the last attempt."""
    attempts = run.ordered()
    if not attempts:
        return 0
    last = attempts[-1]
    return parameters_of(last, last.modules())


def _every(description: dict[str, Any]) -> int:
    config = description.get("config")
    every = config.get("every", 1) if isinstance(config, dict) else 1
    return every if isinstance(every, int) else 1
