"""`ddpcheck records` prints records of lines and of blocks as JSON, and selects them by rank, kind and step."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from ddpcheck.cli.app import app
from ddpcheck.errors import UsageError
from tests.helpers.paths import ROOT

STORED = ROOT / "tests" / "stored_runs"


def printed(*options: str, run: str = "2-learning-rate") -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, ["records", str(STORED / run), *options])
    assert done.exit_code == 0, done
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_both_versions_print_the_same() -> None:
    old, new = printed(run="1-learning-rate"), printed()
    assert [row for row in new if row["kind"] != "rank"] == [row for row in old if row["kind"] != "rank"]
    assert {row["kind"] for row in new} >= {"rank", "module", "digest", "end"}
    assert {row["rank"] for row in new} == {0, 1, 2}


def test_records_of_a_rank_a_kind_and_some_steps() -> None:
    rows = printed("--rank", "2", "--kind", "digest", "--steps", "5:7")
    assert {(row["rank"], row["kind"]) for row in rows} == {(2, "digest")}
    assert {row["step"] for row in rows} == {5, 6}
    several = printed("--rank", "0", "--rank", "2", "--kind", "rank", "--kind", "end")
    assert [(row["rank"], row["kind"]) for row in several] == [
        (0, "rank"),
        (0, "end"),
        (2, "rank"),
        (2, "end"),
    ]


@pytest.mark.parametrize("options", [["--kind", "digests"], ["--steps", "5-7"]])
def test_what_cannot_be_selected_is_an_error(options: list[str]) -> None:
    done = CliRunner().invoke(app, ["records", str(STORED / "2-learning-rate"), *options])
    assert isinstance(done.exception, UsageError)


def test_damaged_records_are_counted() -> None:
    done = CliRunner().invoke(app, ["records", str(STORED / "1-damaged")])
    assert done.exit_code == 0
    assert "damaged or unknown" in done.stderr
    assert all(json.loads(line)["kind"] for line in done.stdout.splitlines())
