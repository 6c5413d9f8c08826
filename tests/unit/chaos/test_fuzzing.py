"""A sample of the campaign on damaged files: `make chaos` runs the rest. docs/reliability.md says what has to hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import fuzzing
from tests.chaos.fuzzing import stored_seeds

# CPython 3.12 and later warn of forks in a process with threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
EXAMPLES = 40


def test_damaged_files_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing, "CHUNK", EXAMPLES)
    seeds = stored_seeds(tmp_path / "seeds")
    outcomes = fuzzing._in_a_process(0, seeds, tmp_path / "notes", tmp_path / "kept")
    assert [outcome for outcome in outcomes if outcome.wrong] == []
    assert len(outcomes) > EXAMPLES / 2


def test_what_must_not_happen_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that writes elsewhere, runs a program, raises, and prints a control sequence."""
    program = """
import os, subprocess, sys
print("\\x1b[2J")
open(os.path.join({folder!r}, "elsewhere"), "w").close()
subprocess.run(["true"])
raise KeyError("damaged")
"""
    code = compile(program.format(folder=str(tmp_path)), "report.py", "exec")
    monkeypatch.setattr("ddpcheck.__main__.main", lambda arguments: exec(code, {}))
    monkeypatch.setattr(fuzzing, "CHUNK", 1)
    monkeypatch.setattr(fuzzing, "_warm_up", lambda seeds: None)
    [outcome] = fuzzing._in_a_process(
        0, stored_seeds(tmp_path / "seeds"), tmp_path / "notes", tmp_path / "kept"
    )
    text = "\n".join(outcome.wrong)
    for expected in (
        "KeyError: 'damaged'",
        f"open {tmp_path}/elsewhere",
        "subprocess.Popen",
        "a control sequence",
    ):
        assert expected in text
