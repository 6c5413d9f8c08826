"""Votes on local gradients: which rank they name, and when they name none."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpcheck.analysis.audit.judgement import SKIP_TEXTS
from ddpcheck.analysis.finding import Finding
from ddpcheck.probes.sketches.sketch import Sketch
from ddpcheck.records.codecs import pack
from ddpcheck.records.kinds.audit import AuditRecord, GradientVote
from ddpcheck.records.reasons import AuditSkip
from ddpcheck.rules.divergence.ddp217 import RULE
from tests.helpers.run_builder import NAMES, RunBuilder

# The gradient of each source, by the rank that computes it, in one step: a number that stands for its values.
Values = Callable[[int, int, bool], float]


def right(source: int, voter: int, replayed: bool) -> float:
    return 1.0 + source


def vote(source: int, value: float, size: float = 1.0) -> list[object]:
    """`value` distinguishes gradients; `size` is the norm of each."""
    leaves = b"".join(f"{value:8.3g}"[:8].encode() for _ in NAMES)
    sketches = pack(Sketch(value * size, size * 10, 0, 4) for _ in NAMES)
    return GradientVote(source, f"{value}", base64.b64encode(leaves).decode(), sketches).to_row()


def findings(
    folder: Path,
    world_size: int,
    steps: dict[int, Values],
    *,
    deterministic: bool = True,
    environments: tuple[str, ...] = ("e", "e", "e", "e"),
    without: frozenset[tuple[int, int]] = frozenset(),
    excluded: tuple[int, ...] = (),
) -> list[Finding]:
    """DDP217 of a run with audits at `steps`. `without`: pairs of source and rank whose replay is missing."""
    run = RunBuilder(folder, world_size)
    run.wrap()
    for step, values in steps.items():
        for rank in run.ranks:
            sources = dict.fromkeys((rank + offset) % world_size for offset in (1, 2))
            missing = GradientVote(0, reason=AuditSkip.NOT_HANDED_OVER.value)
            rows = [vote(rank, values(rank, rank, False))]
            for source in sources:
                row = vote(source, values(source, rank, True))
                rows.append([source, *missing.to_row()[1:]] if (source, rank) in without else row)
            record = AuditRecord(
                module=0,
                step=step,
                votes=rows,
                excluded=list(excluded),
                environment=environments[rank],
                deterministic=deterministic,
            )
            run.add(rank, record)
    return [finding for finding in run.report().findings if finding.code == RULE.code]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_gradients(tmp_path: Path, world_size: int) -> None:
    assert findings(tmp_path, world_size, {0: right, 4: right}) == []


def flipped_once(rank: int) -> Values:
    """The gradient of the training is wrong, what the rank computes afterwards is right."""
    return lambda source, voter, replayed: 9.0 if (source, voter) == (rank, rank) and not replayed else 1.0


def broken(rank: int) -> Values:
    """Everything that the rank computes is wrong, in the same way each time."""
    return lambda source, voter, replayed: 1.0 + (voter == rank)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_gradient_that_was_wrong_once(tmp_path: Path, world_size: int) -> None:
    rank = world_size - 1
    (finding,) = findings(tmp_path, world_size, {0: right, 4: right, 8: flipped_once(rank)})
    assert (finding.ranks, finding.step, finding.stage) == ((rank,), 8, "local")
    assert finding.parameter == NAMES[-1]
    assert not finding.evidence["lasting"]


@pytest.mark.parametrize("world_size", [3, 4])
def test_a_device_that_computes_wrongly(tmp_path: Path, world_size: int) -> None:
    (finding,) = findings(tmp_path, world_size, {0: right, 4: broken(1), 8: broken(1)})
    assert (finding.ranks, finding.step) == ((1,), 4)
    assert finding.evidence["lasting"]
    assert finding.evidence["steps"] == [4, 8]
    assert finding.evidence["devices"]["1"]["host"] == "node0"


def test_two_ranks_that_contradict_each_other(tmp_path: Path) -> None:
    (finding,) = findings(tmp_path, 2, {0: right, 4: broken(1)})
    assert (finding.ranks, finding.step) == ((0, 1), 4)


def test_a_wrong_replay_names_the_rank_that_replayed(tmp_path: Path) -> None:
    wrong = lambda source, voter, replayed: 1.0 + (replayed and (source, voter) == (0, 2))  # noqa: E731
    (finding,) = findings(tmp_path, 3, {0: wrong})
    assert finding.ranks == (2,)


def test_several_devices_that_failed_at_once(tmp_path: Path) -> None:
    wrong = lambda source, voter, replayed: 5.0 if source == voter and source < 2 else 1.0  # noqa: E731
    (finding,) = findings(tmp_path, 5, {0: wrong}, environments=("e",) * 5)
    assert finding.ranks == (0, 1)


def test_a_module_that_is_never_reproducible(tmp_path: Path) -> None:
    """The forward depends on something that is not handed over: every rank differs from its replays."""
    hidden = lambda source, voter, replayed: 1.0 + (not replayed)  # noqa: E731
    assert findings(tmp_path, 4, {0: hidden, 4: hidden}) == []


def test_results_that_never_repeat(tmp_path: Path) -> None:
    random = lambda source, voter, replayed: 1.0 + 10 * source + voter + 0.5 * replayed  # noqa: E731
    assert findings(tmp_path, 4, {0: random, 4: random}) == []


def test_one_round_among_many_that_no_device_explains(tmp_path: Path) -> None:
    hidden = lambda source, voter, replayed: 1.0 + (not replayed)  # noqa: E731
    steps: dict[int, Values] = dict.fromkeys(range(0, 40, 2), right)
    steps[40], steps[42] = hidden, broken(3)
    (finding,) = findings(tmp_path, 4, steps)
    assert (finding.ranks, finding.step) == ((3,), 42)


def test_a_missing_replay_leaves_two_candidates(tmp_path: Path) -> None:
    missing = frozenset({(1, 0)})
    (finding,) = findings(tmp_path, 3, {0: right, 4: flipped_once(1)}, without=missing)
    # Rank 2 replayed it, rank 0 did not.
    assert (finding.ranks, finding.step) == ((1, 2), 4)


def test_parameters_that_are_not_compared(tmp_path: Path) -> None:
    """Their gradients do not come through the outputs alone; the outputs agree."""

    def run(excluded: tuple[int, ...]) -> list[Finding]:
        return findings(tmp_path / str(len(excluded)), 3, {0: right}, excluded=excluded)

    assert run((0, 1, 2)) == run(()) == []


@pytest.mark.parametrize("environments", [("e", "e", "e"), ("e", "e", "other")])
def test_rounding_on_kernels_that_may_differ(tmp_path: Path, environments: tuple[str, ...]) -> None:
    """A difference within the rounding bound is none there, and a large one still is."""
    tiny = lambda source, voter, replayed: 1.0 + 1e-7 * (voter == 2)  # noqa: E731
    same = environments[2] == "e"
    options = {"deterministic": not same, "environments": environments}
    assert findings(tmp_path / "tiny", 3, {0: tiny}, **options) == []  # type: ignore[arg-type]
    (finding,) = findings(tmp_path / "large", 3, {0: broken(2)}, **options)  # type: ignore[arg-type]
    assert finding.ranks == (2,)


def test_damaged_records(tmp_path: Path) -> None:
    run = RunBuilder(tmp_path, 2)
    run.wrap()
    for rank in run.ranks:
        run.add(rank, AuditRecord(module=0, step=0, votes=[["x"], [], [0, "", "?", "?", "", ""]]))
    assert not {finding.code for finding in run.report().findings} & {RULE.code, "DDP605"}


def test_every_reason_has_a_text() -> None:
    assert set(SKIP_TEXTS) == {reason.value for reason in AuditSkip}


@pytest.mark.parametrize(("reason", "outcome"), [(AuditSkip.COMPILED, "not checked"), (None, "agree")])
def test_the_check_in_the_report(tmp_path: Path, reason: AuditSkip | None, outcome: str) -> None:
    run = RunBuilder(tmp_path, 2)
    run.wrap()
    for rank in run.ranks:
        sources = (rank, 1 - rank, rank)
        skipped = [GradientVote(source, reason=reason.value if reason else "").to_row() for source in sources]
        rows = skipped if reason else [vote(source, 1.0) for source in sources]
        run.add(rank, AuditRecord(module=0, step=0, votes=rows, microseconds=1500))
    (check,) = [each for each in run.report().checks if "computed again" in each.name]
    assert check.outcome == outcome
    assert (SKIP_TEXTS[reason.value] if reason else "1.5 ms") in check.detail
