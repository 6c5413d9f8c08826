"""JUnit XML, which Jenkins, GitLab and most CI systems show: one test case for each finding code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from xml.etree import ElementTree

from ddpcheck.analysis.exit_policy import ExitPolicy, is_incomplete
from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.report import Report, Verdict
from ddpcheck.reports.finding_text import finding_text
from ddpcheck.reports.safe_text import safe_line
from ddpcheck.reports.verdict import in_order, verdict_sentence
from ddpcheck.rules.rule import Need, rule_of, rules


def why_not_looked_at(report: Report, code: str) -> str:
    """Why the rule of `code` could not report; empty if it could."""
    rule = rule_of(code)
    if rule is None or not rule.needs:
        return ""
    if not report.checks:
        return "too little was recorded"
    missing = [_why_missing(report, need) for need in rule.needs]
    return missing[0] if all(missing) else ""


def _why_missing(report: Report, need: Need) -> str:
    if need is Need.RECORDS:
        return ""
    if need.is_section:
        return "" if getattr(report, need.value, None) else f"nothing about {need.value} was recorded"
    return "" if _compared(report, need.value) else f"{need.value}: {_detail(report, need.value)}"


def _compared(report: Report, name: str) -> bool:
    return any(check.compared for check in report.checks if check.name == name)


def _detail(report: Report, name: str) -> str:
    return next(
        (check.detail or check.outcome for check in report.checks if check.name == name), "not checked"
    )


# Characters that XML 1.0 does not allow, even escaped.
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: Report, fail_on: str = "error", allow_incomplete: bool = False) -> str:
    """The document; findings below `fail_on` are in the output of test cases that pass."""
    policy = ExitPolicy(fail_on, allow_incomplete)
    suite = ElementTree.Element("testsuite", {"name": "ddpcheck"})
    _properties(suite, report)
    cases = [
        _command_case(report),
        _coverage_case(report, policy),
        *(_case(report, code, policy) for code in _codes(report)),
    ]
    suite.extend(cases)
    ElementTree.SubElement(suite, "system-out").text = _legal(_checked(report))
    counts = {
        "tests": len(cases),
        "failures": sum(case.find("failure") is not None for case in cases),
        "errors": sum(case.find("error") is not None for case in cases),
    }
    suite.attrib |= {key: str(value) for key, value in counts.items()}
    suite.set("skipped", str(sum(case.find("skipped") is not None for case in cases)))
    _set_time_and_host(suite, report)
    root = ElementTree.Element("testsuites", {"name": "ddpcheck", **{k: str(v) for k, v in counts.items()}})
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False).join(
        ('<?xml version="1.0" encoding="UTF-8"?>\n', "\n")
    )


def _codes(report: Report) -> list[str]:
    """The codes of all rules, and of findings of other versions."""
    return sorted({*(rule.code for rule in rules()), *(finding.code for finding in report.findings)})


def _case(report: Report, code: str, policy: ExitPolicy) -> ElementTree.Element:
    rule = rule_of(code)
    case = _named(f"ddpcheck.{code}", code if rule is None else f"{code} {rule.title}")
    findings = [finding for finding in in_order(report) if finding.code == code]
    failing = [finding for finding in findings if policy.fails_on(finding.code, finding.severity)]
    if failing:
        failure = ElementTree.SubElement(
            case, "failure", {"type": code, "message": _legal(_headline(failing[0]))}
        )
        failure.text = _legal(_text(failing))
    elif findings:
        ElementTree.SubElement(case, "system-out").text = _legal(_text(findings))
    elif reason := why_not_looked_at(report, code):
        ElementTree.SubElement(case, "skipped", {"message": _legal(reason)})
    return case


def _command_case(report: Report) -> ElementTree.Element:
    case = _named("ddpcheck.command", "the command ends with status 0")
    if report.verdict is Verdict.FAILED:
        message = f"{verdict_sentence(report)}: {shlex.join(report.command)}"
        ElementTree.SubElement(
            case, "error", {"type": f"status {report.exit_code}", "message": _legal(safe_line(message))}
        )
    elif report.exit_code is None:
        ElementTree.SubElement(case, "skipped", {"message": "the exit status of the command is unknown"})
    return case


def _coverage_case(report: Report, policy: ExitPolicy) -> ElementTree.Element:
    case = _named("ddpcheck.coverage", "everything that is trained is compared")
    coverage = report.coverage
    incomplete = is_incomplete(report.verdict, None if coverage is None else coverage.complete)
    if incomplete and policy.fails_if_incomplete:
        gap = _legal(safe_line(coverage.gap)) if coverage is not None and coverage.gap else "no_records"
        message = _legal(safe_line(verdict_sentence(report)))
        ElementTree.SubElement(case, "error", {"type": gap, "message": message})
    elif incomplete:
        ElementTree.SubElement(case, "system-out").text = _legal(safe_line(verdict_sentence(report)))
    return case


def _named(group: str, name: str) -> ElementTree.Element:
    return ElementTree.Element("testcase", {"classname": group, "name": _legal(safe_line(name)), "time": "0"})


def _properties(suite: ElementTree.Element, report: Report) -> None:
    facts = {
        "verdict": report.verdict.value,
        "ranks": report.world_size,
        "steps": report.steps,
        "command": shlex.join(report.command),
        "run": report.run.get("path") or "",
    }
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in facts.items():
        ElementTree.SubElement(properties, "property", {"name": name, "value": _legal(safe_line(value))})


def _set_time_and_host(suite: ElementTree.Element, report: Report) -> None:
    seconds, started = report.run.get("seconds"), str(report.run.get("started") or "")
    hosts = report.run.get("hosts") or ()
    if isinstance(seconds, (int, float)):
        suite.set("time", f"{seconds:.3f}")
    if started:
        # The common schema does not allow an offset from UTC.
        suite.set("timestamp", _legal(safe_line(started.partition("+")[0])))
    if hosts:
        suite.set("hostname", _legal(safe_line(next(iter(hosts)))))


def _headline(finding: Finding) -> str:
    return safe_line(finding.message or finding.title)


def _text(findings: Iterable[Finding]) -> str:
    return "\n\n".join(map(finding_text, findings))


def _checked(report: Report) -> str:
    lines = [f"{check.outcome}: {check.name} ({check.detail})" for check in report.checks]
    return "\n".join([safe_line(verdict_sentence(report)), *map(safe_line, lines)])


def _legal(text: str) -> str:
    return _ILLEGAL.sub(lambda match: f"\\u{ord(match.group()):04x}", text)
