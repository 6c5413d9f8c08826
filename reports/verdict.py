"""The verdict in one sentence, the first line of every report."""

from __future__ import annotations

import signal

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import Report, Verdict
from ddpcheck.analysis.step_coverage.text import expected_gaps
from ddpcheck.formatting import counted as counted
from ddpcheck.formatting import name_ranks
from ddpcheck.reports.views.cost import left_out_text, parameters_interval
from ddpcheck.rules.rule import Location, Need, rule_of


def verdict_sentence(report: Report) -> str:
    """What happened, in one sentence."""
    synthetic = "Synthetic records: " if report.run.get("synthetic") else ""
    return synthetic + _sentence(report)


def _sentence(report: Report) -> str:
    lead = leading_finding(report)
    if lead is not None and _is_divergence(lead):
        return _diverged(report, lead)
    if report.run.get("interrupted"):
        return _interrupted(report, lead)
    if report.verdict is Verdict.FAILED:
        return _failed(report, lead)
    if report.verdict is Verdict.INCOMPLETE:
        return _incomplete(report)
    if lead is not None and lead.severity is not Severity.NOTE:
        return _problem(report, lead)
    return _agreement(report)


def in_order(report: Report) -> list[Finding]:
    """Findings by severity, otherwise in the order of the analysis."""
    return sorted(report.findings, key=lambda finding: -finding.severity.weight)


def leading_finding(report: Report) -> Finding | None:
    """The finding the verdict is about: the first divergence, else the most severe one."""
    ordered = in_order(report)
    return next(iter([item for item in ordered if _is_divergence(item)] or ordered), None)


def _is_divergence(finding: Finding) -> bool:
    rule = rule_of(finding.code)
    diverges = rule is not None and rule.replicas_diverge and finding.severity is Severity.ERROR
    return diverges and not finding.evidence.get("replicas_agree")


def _diverged(report: Report, lead: Finding) -> str:
    rule = rule_of(lead.code)
    at_wrapping = rule is not None and rule.location is Location.WRAPPING and lead.step is None
    where = " at wrapping" if at_wrapping else ""
    if lead.step is not None:
        where = f" at step {lead.step}"
        last_equal = lead.evidence.get("last_equal_step")
        if isinstance(last_equal, int) and last_equal + 1 < lead.step:
            where = f" between steps {last_equal + 1} and {lead.step}"
    parameter = f" in {lead.parameter}" if lead.parameter else ""
    after = f"; the command {_ending(report.exit_code)}" if report.verdict is Verdict.FAILED else ""
    return f"Replicas diverge{where}{parameter} ({lead.code}){after}"


def _failed(report: Report, lead: Finding | None) -> str:
    text = f"The command {_ending(report.exit_code)} ({_size(report)})"
    if lead is not None and lead.severity is not Severity.NOTE:
        return f"{text}: {_as_clause(lead.title)}"
    if _agreed(report):
        return f"{text}; replicas agree in all recorded steps"
    return text


def _interrupted(report: Report, lead: Finding | None) -> str:
    text = f"Interrupted after {counted(report.steps, 'step')}"
    if lead is not None and lead.severity is not Severity.NOTE:
        return f"{text}: {_as_clause(lead.title)} ({lead.code})"
    return f"{text}; replicas agreed so far" if _agreed(report) else text


def _incomplete(report: Report) -> str:
    text = "Not enough was recorded to compare the replicas"
    lead = next((finding for finding in in_order(report) if _explains_gap(finding)), leading_finding(report))
    rule = None if lead is None else rule_of(lead.code)
    if lead is not None and rule is not None and rule.incomplete and rule.headline is not None:
        return f"{rule.headline(lead)} ({_size(report)})"
    return text if lead is None else f"{text}: {_as_clause(lead.title)}"


def _explains_gap(finding: Finding) -> bool:
    rule = rule_of(finding.code)
    return rule is not None and rule.incomplete


def _problem(report: Report, lead: Finding) -> str:
    others = len([item for item in report.findings if item.severity is not Severity.NOTE]) - 1
    more = f", and {counted(others, 'more finding')}" if others else ""
    where = f"{name_ranks(lead.ranks)}, {lead.code}" if lead.ranks else lead.code
    rule = rule_of(lead.code)
    if rule is not None and rule.headline is not None:
        return f"{rule.headline(lead)}{more}"
    agree = "; replicas agree" if _agreed(report) else ""
    return f"{lead.title.rstrip('.')} ({where}){more}{agree}"


def _agreement(report: Report) -> str:
    if report.world_size == 1:
        return f"One rank, nothing to compare: {_size(report)}"
    if not _agreed(report):
        return f"No findings, and nothing was trained that could be compared across ranks: {_size(report)}"
    if not _compared_steps(report):
        return f"Replicas agree after wrapping, and no training step was seen: {_size(report)}"
    return f"Replicas agree: {_size(report)}{_thoroughness(report)}"


def _agreed(report: Report) -> bool:
    """Whether replicas were compared and agree. Differing hyperparameters alone make no different replicas."""
    complete = report.coverage is None or report.coverage.complete
    outcomes = {check.outcome for check in report.checks if check.compared and check.name in _OF_REPLICAS}
    return complete and "agree" in outcomes and "differ" not in outcomes


def _compared_steps(report: Report) -> bool:
    """True in reports of earlier versions, which do not say."""
    return report.coverage is None or bool(report.coverage.compared_steps) or bool(report.steps)


def _size(report: Report) -> str:
    return f"{counted(report.world_size, 'rank')}, {counted(report.steps, 'step')}"


# Comparisons of replicas, as `Report.checks` names them.
_OF_REPLICAS = frozenset(
    need.value
    for need in (
        Need.PARAMETERS_AFTER_WRAPPING,
        Need.BUFFERS_AFTER_WRAPPING,
        Need.SYNCHRONISED_BUFFERS,
        Need.PARAMETERS,
        Need.APPLIED_GRADIENTS,
        Need.REDUCED_GRADIENTS,
    )
) | {"all of these with other nodes, through the job's store"}


def _thoroughness(report: Report) -> str:
    parameters = report.run.get("parameters")
    if not isinstance(parameters, int):
        return ""
    every = report.run.get("every", 1)
    how_often = "after every step" if every == 1 else f"after every {every} steps"
    how_often = parameters_interval(report) or how_often
    others = expected_gaps(report.coverage) if report.coverage is not None else ""
    others = f"; not compared: {others}" if others else ""
    return f", {counted(parameters, 'parameter')} compared {how_often}{left_out_text(report)}{others}"


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return "did not end"
    # Python reports a signal as a negative status, a shell as 128 + its number.
    number = -exit_code if exit_code < 0 else exit_code - 128
    try:
        return f"was ended by {signal.Signals(number).name}"
    except ValueError:
        return f"ended with status {exit_code}" if exit_code == 0 else f"failed with status {exit_code}"


def _as_clause(title: str) -> str:
    """A title with a lower-case first letter, unless its first word is a name or an abbreviation."""
    clause = title.rstrip(".")
    ordinary = clause.partition(" ")[0].istitle()
    return clause[:1].lower() + clause[1:] if ordinary else clause
