"""Which reports fail a run."""

from __future__ import annotations

import pytest

from ddpcheck.analysis.exit_policy import ExitPolicy, is_incomplete
from ddpcheck.analysis.finding import Severity
from ddpcheck.analysis.report import Verdict

NOT_COMPARED = ("DDP606", Severity.ERROR)
LOST = ("DDP605", Severity.WARNING)
MISSING = ("DDP601", Severity.ERROR)


@pytest.mark.parametrize(
    ("policy", "findings", "incomplete", "fails"),
    [
        (ExitPolicy(), [], False, False),
        (ExitPolicy(), [LOST], True, True),
        (ExitPolicy(), [], True, True),
        (ExitPolicy("warning"), [], True, True),
        (ExitPolicy("never"), [NOT_COMPARED], True, False),
        (ExitPolicy(allow_incomplete=True), [NOT_COMPARED], True, False),
        (ExitPolicy(allow_incomplete=True), [LOST], True, False),
        (ExitPolicy("warning", allow_incomplete=True), [NOT_COMPARED, LOST], True, True),
        # Without records of a rank there is nothing to allow.
        (ExitPolicy(allow_incomplete=True), [MISSING], True, True),
    ],
)
def test_fails(
    policy: ExitPolicy, findings: list[tuple[str, Severity]], incomplete: bool, fails: bool
) -> None:
    assert policy.fails(findings, incomplete) is fails


@pytest.mark.parametrize(
    ("verdict", "complete", "incomplete"),
    [
        (Verdict.OK, True, False),
        (Verdict.OK, None, False),
        (Verdict.INCOMPLETE, None, True),
        ("incomplete", True, True),
        (Verdict.FINDINGS, False, True),
        ("findings", True, False),
    ],
)
def test_is_incomplete(verdict: Verdict | str, complete: bool | None, incomplete: bool) -> None:
    assert is_incomplete(verdict, complete) is incomplete
