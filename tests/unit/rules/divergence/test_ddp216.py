"""DDP216: which restores are reported, and how severely."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.records.kinds.checkpoints import OptimizerRestoreRecord, RestoreRecord, ResumedDataRecord
from tests.helpers.run_builder import RunBuilder

FILE = "/home/me/last.pt"
RESTORED: dict[str, Any] = {"tensors": 10, "equal": 10, "holds": ["model", "optimizer"]}
STATE: dict[str, Any] = {"name": "Adam", "entries": 8, "same_settings": True}
LOADED: dict[str, Any] = {**STATE, "state": "loaded", "found": 8}


@pytest.fixture
def run(tmp_path: Path) -> RunBuilder:
    return RunBuilder(tmp_path, 3).wrap().optimizer()


def restored(run: RunBuilder, ranks: tuple[int, ...] = (0, 1, 2), **fields: Any) -> RunBuilder:
    for rank in ranks:
        run.add(rank, RestoreRecord(0, 0, FILE, **{**RESTORED, **fields}))
    return run


def optimizer(run: RunBuilder, ranks: tuple[int, ...] = (0, 1, 2), **fields: Any) -> RunBuilder:
    for rank in ranks:
        run.add(rank, OptimizerRestoreRecord(0, 0, 0, FILE, **fields))
    return run


def findings(run: RunBuilder) -> list[Finding]:
    return run.train(3).end().findings("DDP216")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"equal": 8, "changed": 2, "correlation": 0.01},
        # Weights that were perturbed after loading.
        {"equal": 0, "changed": 10, "correlation": 0.9},
        {"equal": 0, "changed": 10, "correlation": None},
        {"equal": 8, "misnamed": 2, "misnamed_example": ["m.a", "a"]},
        {"swapped": 2, "swapped_examples": [["a", "b"]]},
        {"cast": 10, "cast_types": ["bfloat16", "float32"]},
    ],
)
def test_modules_that_may_be_meant_so(run: RunBuilder, fields: dict[str, Any]) -> None:
    assert findings(restored(run, **fields)) == []


def test_names_that_differ(run: RunBuilder) -> None:
    restored(run, equal=0, misnamed=9, misnamed_example=["module.head.weight", "head.weight"])
    [finding] = findings(run)
    assert (finding.severity, finding.step, finding.ranks) == (Severity.ERROR, 0, (0, 1, 2))
    assert finding.parameter == "head.weight"
    assert finding.evidence["file"] == FILE


def test_a_part_is_misnamed_in_a_job_that_continues(run: RunBuilder) -> None:
    restored(run, equal=8, misnamed=2, misnamed_example=["m.a", "a"])
    [finding] = findings(optimizer(run, **LOADED))
    assert finding.severity is Severity.WARNING


@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2)])
def test_weights_that_were_overwritten(run: RunBuilder, ranks: tuple[int, ...]) -> None:
    [finding] = findings(restored(run, ranks, equal=0, changed=10, changed_example="a", correlation=0.03))
    assert (finding.severity, finding.ranks, finding.parameter) == (Severity.WARNING, ranks, "a")
    assert ("rank 0 did not load" in finding.cause) == (ranks == (1, 2))


def test_a_rank_that_kept_its_weights_differs_from_the_others(run: RunBuilder) -> None:
    restored(run, (0,))
    assert findings(restored(run, (1, 2), equal=0, changed=10, changed_example="a", correlation=0.0)) == []


def test_other_names_in_a_job_that_continues(run: RunBuilder) -> None:
    restored(run, swapped=2, swapped_examples=[["a", "b"]])
    [finding] = findings(optimizer(run, **LOADED))
    assert (finding.severity, finding.parameter) == (Severity.WARNING, "b")


@pytest.mark.parametrize(
    ("fields", "severity"),
    [
        ({"state": "elsewhere"}, Severity.WARNING),
        ({"state": "empty", "resumed": ["scheduler"]}, Severity.WARNING),
        # Fine-tuning, or another optimizer on purpose.
        ({"state": "empty"}, Severity.NOTE),
        ({"state": "empty", "resumed": ["scheduler"], "same_settings": False}, Severity.NOTE),
        ({"state": "other"}, None),
        ({"state": "loaded", "found": 8}, None),
        (
            {"state": "loaded", "found": 8, "cast": 8, "cast_example": ["m", "float32", "bfloat16"]},
            Severity.WARNING,
        ),
        (
            {
                "state": "loaded",
                "found": 8,
                "cast": 8,
                "cast_example": ["m", "float32", "bfloat16"],
                "weights_cast": True,
            },
            None,
        ),
        ({"state": "loaded", "found": 8, "rounded": ["bfloat16", "float32"]}, Severity.WARNING),
        ({"state": "loaded", "found": 6, "fresh": 2, "fresh_examples": ["h"]}, Severity.WARNING),
        # The weights came from elsewhere.
        ({"state": "loaded", "found": 0, "fresh": 8, "fresh_examples": ["h"]}, None),
    ],
)
def test_states_of_the_optimizer(run: RunBuilder, fields: dict[str, Any], severity: Severity | None) -> None:
    found = findings(optimizer(restored(run), **{**STATE, **fields}))
    assert [finding.severity for finding in found] == ([severity] if severity is not None else [])


def test_a_state_on_some_ranks_is_no_subject_of_this_rule(run: RunBuilder) -> None:
    optimizer(run, (0,), **LOADED)
    assert findings(optimizer(run, (1, 2), **STATE, state="elsewhere")) == []


@pytest.mark.parametrize(
    ("fields", "state", "severity"),
    [
        ({"repeats": 0, "saved_passes": 4}, "loaded", Severity.WARNING),
        ({"repeats": 4, "saved_passes": 4, "saved_batches": 7, "in_progress": True}, "loaded", Severity.NOTE),
        ({"repeats": -1, "saved_passes": 4}, "loaded", None),
        # Another training that begins with these weights.
        ({"repeats": 0, "saved_passes": 4}, "other", None),
    ],
)
def test_an_order_that_comes_again(
    run: RunBuilder, fields: dict[str, Any], state: str, severity: Severity | None
) -> None:
    optimizer(restored(run), **{**STATE, "state": state, "found": 8})
    run.add(0, ResumedDataRecord(0, 1, FILE, **fields))
    found = findings(run)
    assert [(finding.severity, finding.ranks) for finding in found] == (
        [(severity, (0,))] if severity is not None else []
    )


def test_a_state_that_was_not_asked_for(run: RunBuilder) -> None:
    [finding] = findings(optimizer(run, name="Adam", entries=8, state="not_requested"))
    assert (finding.severity, finding.step, finding.ranks) == (Severity.WARNING, 0, (0, 1, 2))
    assert finding.evidence["entries"] == 8


def test_parts_that_were_left_in_the_file(run: RunBuilder) -> None:
    [finding] = findings(optimizer(restored(run), **LOADED, not_restored=["scheduler", "rng"]))
    assert finding.severity is Severity.NOTE
    assert finding.evidence["not_restored"] == ["scheduler", "rng"]


@pytest.mark.parametrize(
    ("fields", "severity", "words"),
    [
        (
            {"in_progress": True, "repeats": 0, "passed_over": 3},
            Severity.WARNING,
            "2 batches of each rank are used",
        ),
        (
            {"in_progress": True, "repeats": 0, "passed_over": 9},
            Severity.WARNING,
            "4 batches of each rank are never",
        ),
        ({"in_progress": True, "repeats": 0}, Severity.NOTE, "used twice"),
        ({"left_out": 7}, Severity.NOTE, "7 batches of each rank are never used"),
    ],
)
def test_the_position_within_an_epoch(
    run: RunBuilder, fields: dict[str, Any], severity: Severity, words: str
) -> None:
    optimizer(restored(run), **LOADED)
    run.add(1, ResumedDataRecord(0, 1, FILE, saved_batches=5, **fields))
    [finding] = findings(run)
    assert (finding.severity, finding.ranks) == (severity, (1,))
    assert words in finding.message


def test_what_the_loaded_state_dict_lacks(run: RunBuilder) -> None:
    restored(run, equal=8, left=2, left_examples=["1.running_mean", "1.running_var"])
    [finding] = findings(optimizer(run, **LOADED))
    assert (finding.severity, finding.parameter) == (Severity.WARNING, "1.running_mean")


def test_a_new_training_may_leave_out_what_it_likes(run: RunBuilder) -> None:
    assert findings(restored(run, equal=8, left=2, left_examples=["head.weight"])) == []
