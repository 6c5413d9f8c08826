"""Deaths in several attempts: who was first, whose error only followed, and what a restart made good."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.report import RankStatus, Report
from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.records.kinds.rank import EndRecord, RankHeader
from ddpcheck.records.registry import to_line

JOB = "f" * 16
OTHER_JOB = "e" * 16
LOST = "RuntimeError: connection closed by peer"
FIRE = "RuntimeError: the disk is on fire"


class Folder:
    """A run folder that is filled attempt by attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._attempts = 0
        ended = {"exit_code": 0, "ended": "now", "command": ["torchrun"]}
        (path / "run.json").write_text(json.dumps(ended))

    def attempt(self, *errors: str | None, session: str, restart: int = 0, run_id: str = "") -> None:
        """One rank for each error, the highest ended first; None: killed, without last words."""
        suffix = f".{self._attempts}" if self._attempts else ""
        start = 1000.0 * (self._attempts + 1)
        self._attempts += 1
        for rank, error in enumerate(errors):
            pid = 100 * self._attempts + rank
            environment = {"TORCHELASTIC_RUN_ID": run_id} if run_id else {}
            header = RankHeader(
                rank, len(errors), "host", pid, 1, session, start, restart=restart, environment=environment
            )
            end = None if error is None else EndRecord("", start + 100 - rank, error)
            lines = [to_line(record) for record in (header, end) if record is not None]
            (self.path / f"rank-{rank:05d}{suffix}.jsonl").write_bytes(b"".join(lines))

    def report(self) -> Report:
        return analyse_run(self.path)

    def deaths(self) -> list[Finding]:
        return [finding for finding in self.report().findings if finding.code == "DDP602"]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_the_first_to_raise_is_named_and_who_followed_is_not(folder: Folder) -> None:
    folder.attempt(LOST, FIRE, session="a" * 32)
    [finding] = folder.deaths()
    assert finding.ranks == (1,)
    assert finding.cause == FIRE
    assert "Then rank 0 failed too" in finding.message
    assert finding.severity.value == "error"


def test_ranks_that_meet_the_same_error_are_named_together(folder: Folder) -> None:
    folder.attempt(FIRE, FIRE, LOST, session="a" * 32)
    # The last rank ends first here, and its error is another one.
    [finding] = folder.deaths()
    assert finding.ranks == (2,)
    folder.attempt(LOST, FIRE, FIRE, session="b" * 32)
    assert folder.deaths()[1].ranks == (1, 2)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"session": "a" * 16 + JOB}, {"session": "b" * 16 + JOB}),
        ({"session": "a" * 32, "run_id": "x"}, {"session": "b" * 32, "run_id": "x", "restart": 1}),
    ],
    ids=["one store", "one run id and a higher count"],
)
def test_a_restart_that_finished_makes_a_death_good(folder: Folder, first: dict, second: dict) -> None:
    folder.attempt(LOST, FIRE, **first)
    folder.attempt("", "", **second)
    [finding] = folder.deaths()
    assert (finding.severity.value, finding.attempt) == ("warning", 0)
    assert finding.evidence["made_good_by"] == 1
    assert [attempt.ranks[0].status for attempt in folder.report().attempts] == [
        RankStatus.RAISED,
        RankStatus.FINISHED,
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"session": "a" * 16 + JOB}, {"session": "b" * 16 + OTHER_JOB}),
        ({"session": "a" * 32, "run_id": "x"}, {"session": "b" * 32, "run_id": "x"}),
        ({"session": "a" * 32, "run_id": "x"}, {"session": "b" * 32, "run_id": "y", "restart": 1}),
        ({"session": "a" * 32}, {"session": "b" * 32, "restart": 1}),
    ],
    ids=["another store", "the same count", "another run id", "no run id"],
)
def test_another_job_makes_nothing_good(folder: Folder, first: dict, second: dict) -> None:
    folder.attempt(LOST, FIRE, **first)
    folder.attempt("", "", **second)
    [finding] = folder.deaths()
    assert finding.severity.value == "error"


def test_the_last_restart_decides(folder: Folder) -> None:
    folder.attempt(LOST, FIRE, session="a" * 16 + JOB)
    folder.attempt(LOST, FIRE, session="b" * 16 + JOB)
    assert [finding.severity.value for finding in folder.deaths()] == ["error", "error"]
    folder.attempt("", "", session="c" * 16 + JOB)
    assert [finding.severity.value for finding in folder.deaths()] == ["warning", "warning"]


def test_a_rank_that_comes_back_under_the_same_name_starts_another_attempt(folder: Folder) -> None:
    folder.attempt(LOST, FIRE, session="a" * 32)
    folder.attempt("", "", session="a" * 32)
    report = folder.report()
    assert [[row.pid for row in attempt.ranks] for attempt in report.attempts] == [[100, 101], [200, 201]]
    assert [finding.severity.value for finding in folder.deaths()] == ["warning"]
