"""Reports of run folders: verdicts, coverage, damaged folders and restarts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.analysis import report_builder
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.exit_policy import ExitPolicy
from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.report import RankStatus, Report
from ddpcheck.analysis.report_builder import analyse_run, build_report
from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.errors import RunNotFound, RunUnreadable
from ddpcheck.records.kinds.digests import Stage, TensorKind
from ddpcheck.records.kinds.rank import EndRecord, RankHeader
from ddpcheck.records.registry import to_line
from ddpcheck.rules import rule as registry
from tests.helpers.run_builder import RunBuilder

OUTLIERS = {1: ["body.bias"]}


def sound(folder: Path, world_size: int = 2) -> RunBuilder:
    return RunBuilder(folder, world_size).wrap().optimizer().train(5).end()


def broken(folder: Path) -> RunBuilder:
    return RunBuilder(folder, 2).wrap().optimizer().train(5, outliers=OUTLIERS).end()


def checks(report: Report) -> dict[str, tuple[int, str]]:
    return {check.name: (check.compared, check.outcome) for check in report.checks}


def test_a_healthy_run_is_ok(tmp_path: Path) -> None:
    report = sound(tmp_path, 4).report()
    assert (report.verdict.value, report.findings) == ("ok", ())
    assert (report.world_size, report.steps, report.exit_code) == (4, 5, 0)
    assert report.command == ("torchrun", "train.py")
    assert report.run["hosts"] == ["node0"]
    assert report.run["torch"] == ["2.13.0"]
    assert report.run["unreadable_lines"] == 0


def test_a_note_leaves_a_run_ok(tmp_path: Path) -> None:
    report = RunBuilder(tmp_path, 2).wrap(outliers_before=OUTLIERS).train(3).end().report()
    assert [finding.code for finding in report.findings] == ["DDP102"]
    assert report.verdict.value == "ok"


def test_an_error_makes_it_findings(tmp_path: Path) -> None:
    assert broken(tmp_path).report().verdict.value == "findings"


@pytest.mark.parametrize(
    ("exit_code", "stopped", "verdict"), [(1, "", "failed"), (-9, "", "failed"), (1, "x", "findings")]
)
def test_a_command_that_failed_is_failed_unless_we_stopped_it(
    tmp_path: Path, exit_code: int, stopped: str, verdict: str
) -> None:
    build = broken(tmp_path)
    build.description |= {"exit_code": exit_code, "stopped": stopped}
    assert build.report().verdict.value == verdict


def test_a_run_without_reporting_ranks_is_incomplete(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2)
    build.records.clear()
    report = build.report()
    assert (report.verdict.value, [finding.code for finding in report.findings]) == ("incomplete", ["DDP601"])
    assert (report.attempts, report.checks, report.world_size) == ((), (), 0)


def test_the_worst_comes_first(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap(outliers_before=OUTLIERS).optimizer().train(3, outliers=OUTLIERS)
    report = build.end([0]).report()
    assert [finding.severity.value for finding in report.findings] == ["error", "error", "note"]


@pytest.mark.parametrize(
    ("bar", "fails"), [("error", True), ("warning", True), ("note", True), ("never", False)]
)
def test_a_run_with_findings_fails_by_severity(tmp_path: Path, bar: str, fails: bool) -> None:
    findings = [(finding.code, finding.severity) for finding in broken(tmp_path).report().findings]
    assert ExitPolicy(bar).fails(findings, incomplete=False) is fails


@pytest.mark.parametrize(
    ("bar", "fails"), [("error", False), ("warning", False), ("note", True), ("never", False)]
)
def test_a_note_fails_only_on_request(tmp_path: Path, bar: str, fails: bool) -> None:
    report = RunBuilder(tmp_path, 2).wrap(outliers_before=OUTLIERS).train(3).end().report()
    findings = [(finding.code, finding.severity) for finding in report.findings]
    assert ExitPolicy(bar).fails(findings, incomplete=False) is fails


def test_two_attempts_are_distinguished(tmp_path: Path) -> None:
    first = RunBuilder(tmp_path, 2, session="a" * 32).wrap().train(2, outliers=OUTLIERS).end()
    first.save()
    second = RunBuilder(tmp_path, 2, session="b" * 32)
    for rank in (0, 1):
        header = second.records[rank][0]
        assert isinstance(header, RankHeader)
        second.records[rank][0] = replace(header, time=5000.0)
    report = second.wrap().train(7).end().report()
    assert [(attempt.number, attempt.steps) for attempt in report.attempts] == [(0, 2), (1, 7)]
    assert [(finding.code, finding.attempt) for finding in report.findings] == [("DDP201", 0)]
    assert report.steps == 7


def test_checks_are_listed(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap(buffers=["norm.mean"]).optimizer().train(4)
    by_name = checks(build.end().report())
    assert by_name["parameters after wrapping"] == (1, "agree")
    assert by_name["buffers after wrapping"] == (1, "agree")
    assert by_name["buffers after each synchronisation"] == (0, "not checked")
    assert by_name["parameters after each step"] == (4, "agree")
    assert by_name["optimizer hyperparameters, scale and step counts"] == (4, "agree")


def test_differences_are_reported(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().optimizer().train(2)
    build.step(2, outliers=OUTLIERS, hyper={0: "x", 1: "y"}).step(3, outliers=OUTLIERS)
    report = build.end().report()
    assert checks(report)["parameters after each step"] == (4, "differ")
    assert checks(report)["optimizer hyperparameters, scale and step counts"] == (4, "differ")
    (check,) = [check for check in report.checks if check.name == "parameters after each step"]
    assert check.detail == "4 x 2 ranks, 3 parameters, 2 differ"


def test_a_job_of_one_rank_is_not_compared(tmp_path: Path) -> None:
    report = sound(tmp_path, 1).report()
    assert {check.outcome for check in report.checks} == {"not checked"}
    assert "the job has one rank" in {check.detail for check in report.checks}
    assert report.verdict.value == "ok"


def test_ranks_with_different_hashes_are_not_compared(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2)
    header = build.records[1][0]
    assert isinstance(header, RankHeader)
    build.records[1][0] = replace(header, algorithm="multilinear-128")
    report = build.wrap().train(3, outliers=OUTLIERS).end().report()
    assert not [finding for finding in report.findings if finding.code == "DDP201"]
    assert {check.outcome for check in report.checks} == {"not checked"}


@pytest.mark.parametrize("other", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_rank_with_another_hash_is_left_out_in_any_order(
    tmp_path: Path, other: int, order: tuple[int, ...]
) -> None:
    build = RunBuilder(tmp_path, 3).wrap()
    for step in range(3):
        build.apply(step, outliers={other: ["body.bias"]}).step(step, {other: ["body.bias"]})
    attempt = Attempt("a1")
    records = build.end().records
    headers = {rank: records[rank][0] for rank in order}
    headers[other] = replace(headers[other], algorithm="multilinear-128")  # type: ignore[arg-type]
    for number in range(1, len(records[0])):
        for rank in order:
            attempt.feed(headers[rank], records[rank][number])  # type: ignore[arg-type]
    attempt.end()
    assert not attempt.diverged()
    stats = attempt.agreement.stats_of(((0, 1, 2), 0), Stage.PARAMS, TensorKind.PARAMETERS)
    assert (stats.compared, stats.differing) == (3, 0)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="no run at"):
        analyse_run(tmp_path / "nowhere")


def test_no_run_in_the_folder(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="not a run folder"):
        analyse_run(tmp_path)


def test_a_damaged_run_file_without_records(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunUnreadable, match="damaged"):
        analyse_run(tmp_path)


@pytest.mark.parametrize("content", [None, "{", "[]", "\udcff"])
def test_records_are_enough(tmp_path: Path, content: Any) -> None:
    sound(tmp_path).save()
    if content is None:
        (tmp_path / "run.json").unlink()
    else:
        (tmp_path / "run.json").write_bytes(content.encode(errors="surrogateescape"))
    report = analyse_run(tmp_path)
    assert (report.steps, report.exit_code, report.command) == (5, None, ())


def test_damage_is_counted_and_the_rest_is_analysed(tmp_path: Path) -> None:
    folder = broken(tmp_path).save()
    path = folder / "rank-00001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        b"".join(lines[:4] + [b"\0garbage\xff\n", b'{"kind":"digest"}\n'] + lines[4:]) + b'{"kind":"en'
    )
    (folder / "rank-00009.jsonl").write_bytes(b"no header\n" + lines[3])
    (folder / "node-x.jsonl").write_bytes(b"\xff\n[]\n{}\n" + json.dumps({"kind": "trouble"}).encode())
    report = analyse_run(folder)
    assert report.run["unreadable_lines"] == 2
    assert report.run["files_without_header"] == 1
    assert [finding.code for finding in report.findings] == ["DDP201"]


def test_a_rule_that_fails_loses_only_its_own_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(case: object) -> list[Finding]:
        raise KeyError("no such thing")

    rules = registry.in_report_order()
    broken = replace(next(rule for rule in rules if rule.code == "DDP201"), find=failing)
    monkeypatch.setattr(report_builder, "in_report_order", lambda: (broken, *rules))
    report = sound(tmp_path).report()
    [finding] = report.findings
    assert (finding.code, finding.severity.value) == ("DDP605", "warning")
    assert "rule for DDP201 failed: KeyError: 'no such thing'" in finding.message


# Restarts: which attempt failed first, and which restart finished.
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
        """One rank for each error, the highest ended first; None: killed, without a last record."""
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


def test_the_first_to_raise_is_reported_and_consequences_are_not(folder: Folder) -> None:
    folder.attempt(LOST, FIRE, session="a" * 32)
    [finding] = folder.deaths()
    assert finding.ranks == (1,)
    assert finding.cause == FIRE
    assert "Rank 0 failed as a consequence" in finding.message
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
def test_a_restart_that_finished_recovers_a_death(folder: Folder, first: dict, second: dict) -> None:
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
def test_another_job_recovers_nothing(folder: Folder, first: dict, second: dict) -> None:
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


def test_a_second_file_of_a_rank_starts_another_attempt(folder: Folder) -> None:
    folder.attempt(LOST, FIRE, session="a" * 32)
    folder.attempt("", "", session="a" * 32)
    report = folder.report()
    assert [[row.pid for row in attempt.ranks] for attempt in report.attempts] == [[100, 101], [200, 201]]
    assert [finding.severity.value for finding in folder.deaths()] == ["warning"]


def test_what_the_launcher_could_not_write_is_in_its_report(tmp_path: Path) -> None:
    """A full disk: the rank could not write its records, and the launcher could not record that."""
    sound(tmp_path).save()
    line = b'{"kind":"trouble","time":1.0,"rank":1,"text":"Disk quota exceeded"}\n'
    run, description = RunReader(tmp_path), {"exit_code": 0, "ended": "2026-11-01T10:00:00+00:00"}
    report = build_report(run, description, unwritten=[("node-a.jsonl", line)])
    assert report.verdict.value == "incomplete"
    [finding] = [finding for finding in report.findings if finding.code == "DDP605"]
    assert (finding.ranks, finding.evidence["error"]) == ((1,), "Disk quota exceeded")


def test_an_abandoned_run_is_complete_only_up_to_the_end_of_its_ranks(tmp_path: Path) -> None:
    def verdict(build: RunBuilder, abandoned: bool) -> tuple[str, list[str]]:
        build.description.pop("ended", None)
        build.description.pop("exit_code", None)
        build.save()
        report = analyse_run(build.folder, abandoned=abandoned)
        return report.verdict.value, [finding.code for finding in report.findings]

    training = RunBuilder(tmp_path / "training", 2).wrap().optimizer().train(5)
    assert verdict(training, abandoned=False) == ("ok", [])
    assert verdict(training, abandoned=True)[0] == "incomplete"
    assert "DDP605" in verdict(training, abandoned=True)[1]
    # Its launcher was killed, and the ranks reached their end.
    assert verdict(sound(tmp_path / "ended"), abandoned=True) == ("ok", [])
