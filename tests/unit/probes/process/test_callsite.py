"""The line of the user's code that led to a call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpcheck.probes.process import callsite as module
from ddpcheck.probes.process.callsite import user_callsite
from tests.helpers.paths import ROOT

HERE = Path(__file__).resolve()


def test_the_innermost_call_outside_libraries() -> None:
    file, _, line = user_callsite().rpartition(":")
    assert Path(file).resolve() == HERE
    assert (
        HERE.read_text().splitlines()[int(line) - 1].strip()
        == 'file, _, line = user_callsite().rpartition(":")'
    )


def test_libraries_between_are_passed_over() -> None:
    # json calls back from inside the standard library.
    [callsite] = json.loads("[1]", parse_int=lambda _: (lambda: user_callsite())())
    assert Path(callsite.rpartition(":")[0]).resolve() == HERE


@pytest.mark.parametrize(
    ("file", "users"),
    [
        ("/home/me/train.py", True),
        ("/venv/lib/python3.11/site-packages/torch/optim/sgd.py", False),
        (json.__file__, False),
        ("<frozen runpy>", False),
        ("<string>", False),
        (str(ROOT / "probes" / "optimizers.py"), False),
        (str(ROOT / "ddpcheck" / "agent" / "dispatcher.py"), False),
        (str(ROOT / "examples" / "train.py"), True),
    ],
)
def test_files_of_the_user_and_of_libraries(file: str, users: bool) -> None:
    assert module._is_user_code(file) is users
