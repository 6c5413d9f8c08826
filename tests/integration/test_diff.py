"""Two real runs: equal ones agree, and one change is found where it was made."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import BIN, JOBS, Done, run_to_end

from ddpcheck.diff.compare import compare_runs
from ddpcheck.diff.model import Comparison, DiffSource, DiffVerdict, Method

pytestmark = pytest.mark.slow

EVERYWHERE = (0, 1, 2, 3)
Compare = Callable[[str, str], Comparison]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """All jobs one after the other under one watch; each is an attempt of its own."""
    folder = tmp_path_factory.mktemp("diff")
    command = [sys.executable, JOBS / "diff_cases.py", "--out", folder / "names.json"]
    watch = [
        BIN / "ddpcheck",
        "run",
        "--sketch-every",
        "1",
        "--fail-on",
        "never",
        "--out",
        folder / "run",
        "--",
    ]
    done = run_to_end([*watch, *command], folder, {}, leaves=folder / "run")
    assert done.status == 0, str(done)
    return folder / "run", json.loads((folder / "names.json").read_text())


@pytest.fixture(scope="module")
def compared(cases: tuple[Path, list[str]]) -> Compare:
    run, names = cases
    return lambda a, b: compare_runs(run, run, attempts=(names.index(a), names.index(b)))


@pytest.fixture(scope="module")
def diff(cases: tuple[Path, list[str]]) -> Callable[..., Done]:
    """The command itself, on two of the cases."""
    run, names = cases

    def start(a: str, b: str, *options: str) -> Done:
        attempt = f"{names.index(a)},{names.index(b)}"
        command = [BIN / "ddpcheck", "diff", run, run, "--attempt", attempt, *options]
        return run_to_end(command, run.parent, {"COLUMNS": "80"})

    return start


def test_the_same_job_twice(compared: Compare) -> None:
    found = compared("plain", "again")
    assert (found.verdict, found.method, found.notes) == (DiffVerdict.AGREE, Method.EXACT, ())
    ranks, steps = 2, 24
    for stage in (
        DiffSource.LOCAL,
        DiffSource.REDUCED,
        DiffSource.APPLIED,
        DiffSource.HYPER,
        DiffSource.PARAMS,
        DiffSource.DATA,
    ):
        assert found.compared[stage.value] == ranks * steps, stage


def test_a_run_that_was_stopped_early(compared: Compare) -> None:
    found = compared("plain", "stopped early")
    assert found.verdict is DiffVerdict.AGREE
    assert found.notes == ("Run A took 24 steps and run B 20: the first 20 were compared.",)


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
    for found in (compared(a, b), compared(b, a)):
        assert (found.verdict, found.method) == (DiffVerdict.DIVERGED, Method.EXACT)
        assert found.first is not None
        assert (found.first.step, found.first.stage, found.first.parameter) == (step, stage, parameter)
        assert found.first.ranks == (0, 1)
        # They are attempts of one run: nothing about them differs from the outside.
        assert found.suspects == ()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("one rank", "four ranks"),
        ("plain", "four ranks"),
        ("one rank, adamw", "four ranks, adamw"),
    ],
)
def test_the_same_global_batch_on_more_ranks(compared: Compare, a: str, b: str) -> None:
    found = compared(a, b)
    assert (found.verdict, found.method) == (DiffVerdict.AGREE, Method.ROUNDING)
    assert (found.compared["reduced"], found.compared["hyperparameters"]) == (24, 24)
    # The runs did round differently, and by far less than is allowed.
    assert 0 < max(one.relative for one in found.growth) < 1e-5


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ("one rank", "four ranks, undivided", "gradient norm ratio 4.0 (= world size) in 6 of 6 parameters"),
        (
            "one rank, sums",
            "four ranks, sums",
            "gradient norm ratio 0.25 (= 1 / world size) in 6 of 6 parameters",
        ),
        ("one rank", "four ranks, sums", "gradient norm ratio 32.0 (= global batch) in 6 of 6 parameters"),
    ],
)
def test_a_loss_that_is_scaled_wrongly(compared: Compare, a: str, b: str, says: str) -> None:
    found = compared(a, b)
    assert found.first is not None
    assert (found.first.step, found.first.stage, found.first.message) == (0, DiffSource.REDUCED, says)


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
    found = compared("one rank", b)
    assert found.first is not None
    assert (found.first.step, found.first.stage) == (step, stage)
    assert set(found.first.ranks) <= set(EVERYWHERE)


def test_what_a_split_can_do(compared: Compare) -> None:
    larger = compared("one rank", "four ranks, larger batch")
    first = larger.suspects[0]
    assert (first.what, first.a, first.b) == ("rows of the global batch", 32, 128)
    normed = compared("one rank, normed", "four ranks, normed")
    assert normed.first is not None
    assert normed.first.step == 0
    assert normed.suspects[0].what == "BatchNorm normalises on each rank"


def test_the_command(diff: Callable[..., Done]) -> None:
    agree = diff("one rank", "four ranks")
    assert agree.status == 0, str(agree)
    assert agree.stdout.startswith("The runs agree within rounding, over 24 steps\n")
    parted = diff("plain", "written")
    assert parted.status == 10, str(parted)
    assert parted.stdout.startswith(
        "The runs part at step 4, stage rewritten, module 0, parameter 4.bias, ranks 0-1\n"
    )
    assert max(map(len, parted.stdout.splitlines())) <= 80
    document = json.loads(diff("one rank", "four ranks, undivided", "--json").stdout)
    assert (document["verdict"], document["first"]["step"]) == ("parted", 0)
