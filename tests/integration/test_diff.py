"""Comparing two real runs: equal runs agree, and a single change is found at its step and stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpcheck.diff.compare import compare_runs
from ddpcheck.diff.model import Comparison, DiffSource, DiffVerdict, Method
from tests.helpers.commands import BIN, CommandResult
from tests.helpers.fork_server import prepared
from tests.helpers.paths import JOBS
from tests.helpers.watched_run import run_to_end, run_watched

pytestmark = pytest.mark.slow

EVERYWHERE = (0, 1, 2, 3)
Compare = Callable[[str, str], Comparison]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """All jobs one after the other in one run; each is an attempt."""
    folder = tmp_path_factory.mktemp("diff")
    run = run_watched(
        prepared(JOBS / "diff_cases.py", "--out", folder / "names.json"),
        folder,
        options=["--sketch-every", 1, "--fail-on", "never"],
    )
    assert run.status == 0, str(run)
    return run.folder, json.loads((folder / "names.json").read_text())


@pytest.fixture(scope="module")
def compared(cases: tuple[Path, list[str]]) -> Compare:
    run, names = cases
    return lambda a, b: compare_runs(run, run, attempts=(names.index(a), names.index(b)))


@pytest.fixture(scope="module")
def diff(cases: tuple[Path, list[str]]) -> Callable[..., CommandResult]:
    """The command `ddpcheck diff` on two of the cases."""
    run, names = cases

    def start(a: str, b: str, *options: str) -> CommandResult:
        attempt = f"{names.index(a)},{names.index(b)}"
        command = [BIN / "ddpcheck", "diff", run, run, "--attempt", attempt, *options]
        return run_to_end(command, run.parent, {"COLUMNS": "80"})

    return start


def test_the_same_job_twice(compared: Compare) -> None:
    findings = compared("plain", "again")
    assert (findings.verdict, findings.method, findings.notes) == (DiffVerdict.AGREE, Method.EXACT, ())
    ranks, steps = 2, 24
    for stage in (
        DiffSource.LOCAL,
        DiffSource.REDUCED,
        DiffSource.APPLIED,
        DiffSource.HYPER,
        DiffSource.PARAMS,
        DiffSource.DATA,
    ):
        assert findings.compared[stage.value] == ranks * steps, stage


def test_a_run_that_was_stopped_early(compared: Compare) -> None:
    findings = compared("plain", "stopped early")
    assert findings.verdict is DiffVerdict.AGREE
    assert (findings.a.steps, findings.b.steps) == (24, 20)
    assert findings.compared[DiffSource.PARAMS.value] == 2 * 20
    assert len(findings.notes) == 1


@pytest.mark.parametrize(
    ("a", "b", "step", "stage", "parameter"),
    [
        ("plain", "other seed", -1, DiffSource.INIT, "0.weight"),
        ("plain", "other data", 0, DiffSource.DATA, None),
        ("plain", "scaled loss", 2, DiffSource.LOCAL, "0.weight"),
        ("plain", "lower rate", 3, DiffSource.HYPER, None),
        ("plain", "written", 4, DiffSource.REWRITTEN, "4.bias"),
        ("plain", "clipped", 5, DiffSource.APPLIED, "0.weight"),
        ("dropout", "dropout, other noise", 0, DiffSource.RANDOM, None),
    ],
)
def test_one_change_to_the_bit(
    compared: Compare, a: str, b: str, step: int, stage: DiffSource, parameter: str | None
) -> None:
    for findings in (compared(a, b), compared(b, a)):
        assert (findings.verdict, findings.method) == (DiffVerdict.DIVERGED, Method.EXACT)
        assert findings.first is not None
        assert (findings.first.step, findings.first.stage, findings.first.parameter) == (
            step,
            stage,
            parameter,
        )
        assert findings.first.ranks == (0, 1)
        # They are attempts of one run: command and environment are the same.
        assert findings.suspects == ()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("one rank", "four ranks"),
        ("plain", "four ranks"),
        ("one rank, adamw", "four ranks, adamw"),
    ],
)
def test_the_same_global_batch_on_more_ranks(compared: Compare, a: str, b: str) -> None:
    findings = compared(a, b)
    assert (findings.verdict, findings.method) == (DiffVerdict.AGREE, Method.ROUNDING)
    assert (findings.compared["reduced"], findings.compared["hyperparameters"]) == (24, 24)
    # The runs round differently, by much less than the bound.
    assert 0 < max(one.relative for one in findings.growth) < 1e-5


@pytest.mark.parametrize(
    ("a", "b", "ratio"),
    [
        ("one rank", "four ranks, undivided", 4.0),
        ("one rank, sums", "four ranks, sums", 0.25),
        ("one rank", "four ranks, sums", 32.0),
    ],
)
def test_a_wrongly_scaled_loss(compared: Compare, a: str, b: str, ratio: float) -> None:
    first = compared(a, b).first
    assert first is not None
    assert (first.step, first.stage, first.ratio) == (0, DiffSource.REDUCED, ratio)
    assert (first.differing, first.tensors) == (6, 6)


@pytest.mark.parametrize(
    ("b", "step", "stage"),
    [
        ("four ranks, other seed", -1, DiffSource.INIT),
        ("four ranks, scaled loss", 2, DiffSource.REDUCED),
        ("four ranks, lower rate", 3, DiffSource.HYPER),
        ("four ranks, adamw", 0, DiffSource.HYPER),
    ],
)
def test_one_change_on_more_ranks(compared: Compare, b: str, step: int, stage: DiffSource) -> None:
    findings = compared("one rank", b)
    assert findings.first is not None
    assert (findings.first.step, findings.first.stage) == (step, stage)
    assert set(findings.first.ranks) <= set(EVERYWHERE)


def test_differences_that_come_from_the_split(compared: Compare) -> None:
    larger = compared("one rank", "four ranks, larger batch")
    assert (larger.suspects[0].a, larger.suspects[0].b) == (32, 128)  # rows of the global batch
    normed = compared("one rank, normed", "four ranks, normed")
    assert normed.first is not None
    assert normed.first.step == 0
    assert "BatchNorm" in normed.suspects[0].what


def test_the_command(diff: Callable[..., CommandResult]) -> None:
    agree = diff("one rank", "four ranks")
    assert agree.status == 0, str(agree)
    diverged = diff("plain", "written")
    assert diverged.status == 10, str(diverged)
    # The first line says where.
    headline = diverged.stdout.splitlines()[0]
    assert all(word in headline for word in ("step 4", "rewritten", "4.bias"))
    assert max(map(len, diverged.stdout.splitlines())) <= 80
    document = json.loads(diff("one rank", "four ranks, undivided", "--json").stdout)
    assert (document["verdict"], document["first"]["step"]) == (DiffVerdict.DIVERGED.value, 0)
