"""Posts a finding to a URL while the job runs, and the verdict at its end; Slack shows the text."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.report import Report
from ddpcheck.formatting import name_ranks
from ddpcheck.reports.json_report import plain
from ddpcheck.reports.safe_text import safe_line
from ddpcheck.reports.verdict import verdict_sentence

_TIMEOUT_SECONDS = 10.0
# Chats cut longer messages.
_MOST_CHARACTERS = 1500


def finding_message(run: str, finding: Finding) -> dict[str, Any]:
    """A finding of a running job: `text` is what Slack shows, `finding` is as in report.json."""
    ranks = f" ({name_ranks(finding.ranks)})" if finding.ranks else ""
    step = "" if finding.step is None else f" at step {finding.step}"
    lines = [
        f"{finding.severity.value} {finding.code}{step}: {finding.title}{ranks}",
        finding.message,
        finding.fix,
    ]
    return {"text": _text(run, lines), "event": "finding", "run": run, "finding": plain_finding(finding)}


def verdict_message(run: str, report: Report) -> dict[str, Any]:
    """The end of a job."""
    return {
        "text": _text(run, [verdict_sentence(report)]),
        "event": "verdict",
        "run": run,
        "verdict": report.verdict.value,
        "exit_code": report.exit_code,
        "findings": [plain_finding(finding) for finding in report.findings],
    }


def plain_finding(finding: Finding) -> dict[str, Any]:
    """Without the evidence, which holds values of the job's tensors."""
    keys = (
        "code",
        "severity",
        "title",
        "message",
        "module",
        "step",
        "stage",
        "parameter",
        "ranks",
        "cause",
        "fix",
    )
    return {key: plain(getattr(finding, key)) for key in keys}


def post(url: str, message: dict[str, Any]) -> str:
    """Send a message; returns why it failed, without the URL, which is a secret, or an empty text."""
    request = urllib.request.Request(
        url, json.dumps(message).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        return f"the server answered with status {error.code}"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {getattr(error, 'reason', '') or 'the request failed'}"


def _text(run: str, lines: list[str]) -> str:
    # Slack takes these three characters for markup.
    shown = "\n".join(safe_line(line) for line in [f"ddpcheck: {run}", *lines] if line)[:_MOST_CHARACTERS]
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
