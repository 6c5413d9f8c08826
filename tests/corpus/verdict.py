"""Compares the findings about a job with those that its header expects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.corpus.header import Header
from tests.corpus.jobs import Outcome

# A note that says that a probe of ddpcheck failed.
_OWN_FAULT = "DDP605"
# First words of faulthandler's report of a crash.
_CRASH = "Fatal Python error:"
# Ranks did not report.
_NOBODY = "DDP601"


@dataclass(frozen=True)
class Verdict:
    """Which points of a job are as expected; `misses` describes the others."""

    outcome: Outcome
    found: tuple[str, ...]
    code: bool
    cause: bool
    step: bool
    ranks: bool
    misses: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.misses


def judge(outcome: Outcome) -> Verdict:
    """The verdict on a healthy or faulty job."""
    header = outcome.job.header
    grave = [finding for finding in outcome.findings if _is_grave(finding) or _is_meant(header, finding)]
    found = tuple(sorted(finding["code"] for finding in grave))
    misses = _misses_of_the_job(outcome)
    if header.healthy:
        misses += [f"{f['code']}: {f['message']}" for f in grave]
        return Verdict(outcome, found, not grave, not grave, not grave, not grave, tuple(misses))
    expected = sorted([header.expect, *header.also])
    code = list(found) == expected
    if not code:
        misses.append(f"expected {' '.join(expected)}, found {' '.join(found) or 'nothing'}")
    named = [finding for finding in grave if finding["code"] == header.expect]
    if not named:
        return Verdict(outcome, found, False, False, False, False, tuple(misses))
    points = [_points(header, finding) for finding in named]
    best = max(points, key=lambda point: sum(not miss for miss in point.values()))
    misses += [miss for miss in best.values() if miss]
    return Verdict(
        outcome, found, code, not best["cause"], not best["step"], not best["ranks"], tuple(misses)
    )


def _is_grave(finding: Mapping[str, Any]) -> bool:
    return finding["severity"] in ("error", "warning") or finding["code"] == _OWN_FAULT


def _is_meant(header: Header, finding: Mapping[str, Any]) -> bool:
    return header.note and finding["code"] == header.expect


def _misses_of_the_job(outcome: Outcome) -> list[str]:
    """Whether the job itself ran as its header says, and its ranks reported."""
    header = outcome.job.header
    misses = [outcome.trouble] if outcome.trouble else []
    never_joined = any("init_process_group_at" in finding.get("evidence", {}) for finding in outcome.findings)
    if not outcome.reported and header.expect != _NOBODY and not never_joined:
        misses.append("no rank reported to ddpcheck")
    if header.healthy and Counter(outcome.reported).keys() - {"finished"}:
        misses.append(f"ranks ended as {', '.join(outcome.reported)}")
    if header.healthy and len(outcome.reported) % outcome.job.world_size:
        misses.append(f"{len(outcome.reported)} ranks reported")
    if header.hangs:
        if not outcome.status and outcome.status is not None:
            misses.append("ddpcheck run ended with status 0")
        elif outcome.status is None or outcome.exits:
            misses.append("the job was still there when the corpus stopped it")
        return misses
    failed = outcome.stopped or any(outcome.exits) or outcome.status not in (0, 10)
    if header.fails and not failed:
        misses.append("the job did not fail")
    if not header.fails and (outcome.stopped or any(outcome.exits)):
        misses.append(f"the job failed: exit statuses {list(outcome.exits)}{_last_words(outcome)}")
    elif not header.fails and outcome.status not in (0, 10):
        misses.append(f"the command ended with status {outcome.status}{_last_words(outcome)}")
    return misses


def _points(header: Header, finding: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong, by point; empty if right."""
    finding_text = f"{finding['cause']}\n{finding['message']}"
    step = -1 if finding["step"] is None else finding["step"]
    wanted = "note" if header.note else "warning or error"
    return {
        "severity": _unless(finding["severity"] in wanted, "severity", wanted, finding["severity"]),
        "cause": _unless(
            header.cause.lower() in finding_text.lower(), "cause", header.cause, finding["cause"]
        ),
        "stage": _unless(header.stage in ("", finding["stage"]), "stage", header.stage, finding["stage"]),
        "step": _unless(header.step in (None, step), "step", header.step, step),
        "ranks": _unless(
            header.outliers in (None, tuple(finding["ranks"])), "ranks", header.outliers, finding["ranks"]
        ),
        "parameter": _unless(
            _fits(header.parameter, finding["parameter"] or ""),
            "parameter",
            header.parameter,
            finding["parameter"],
        ),
    }


def _unless(right: bool, point: str, expected: object, found: object) -> str:
    return "" if right else f"{point}: expected {_shown(expected)}, found {_shown(found)}"


def _shown(value: object) -> str:
    return repr(list(value)) if isinstance(value, tuple) else repr(value)


def _fits(pattern: str, name: str) -> bool:
    if pattern.endswith("*"):
        return name.startswith(pattern[:-1])
    return pattern in ("", name)


def _last_words(outcome: Outcome) -> str:
    crashes = [text[text.index(_CRASH) :] for text in outcome.stderr if _CRASH in text]
    if crashes:
        return f"\n{crashes[0].partition('Extension modules:')[0]}"
    if any(outcome.stacks):
        return "\n" + "\n".join(
            f"rank {rank} hung:\n{stack}" for rank, stack in enumerate(outcome.stacks) if stack
        )
    lines = [text.strip().splitlines()[-1] for text in outcome.stderr if text.strip()]
    return f" ({lines[0][:200]})" if lines else ""
