"""Programs beside each other: one that torch fails at its very end is run once more, any other failure counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.corpus import exit_flaw, side_by_side
from tests.corpus.side_by_side import MOST_TIMES, run_both

# As torch leaves it when a worker of gloo outlives the interpreter.
AT_EXIT = f"{exit_flaw.ABORTED}\nFatal Python error: Aborted\n\nThread 0x00007f92407ecb80 (most recent call first):\n"

PROGRAM = """
import sys
from pathlib import Path
count = Path(__file__).with_name("count")
times = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(times))
print("works")
if times <= {failures}:
    sys.stderr.write({last_words!r})
    sys.exit(1)
"""


@pytest.fixture(autouse=True)
def _only_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """ddpcheck itself has nothing to do with it."""
    monkeypatch.setattr(
        side_by_side,
        "_run_watched",
        lambda command, folder, env: (side_by_side.run(command, folder, env), {}),
    )


def runs(folder: Path, failures: int, last_words: str) -> tuple[int, int, int]:
    """How often the program was run, and how it ended both times."""
    script = folder / "program.py"
    script.write_text(PROGRAM.format(failures=failures, last_words=last_words))
    pair = run_both([sys.executable, script])
    assert pair.plain.stdout == pair.watched.stdout == "works\n"
    return int((folder / "count").read_text()), pair.plain.status, pair.watched.status


def test_a_program_that_torch_failed_at_its_end_is_run_again(tmp_path: Path) -> None:
    assert runs(tmp_path, 1, AT_EXIT) == (3, 0, 0)


def test_but_not_for_ever(tmp_path: Path) -> None:
    assert runs(tmp_path, 99, AT_EXIT) == (2 * MOST_TIMES, 1, 1)


def test_any_other_failure_counts(tmp_path: Path) -> None:
    assert runs(tmp_path, 1, "ValueError: no\n") == (2, 1, 0)
