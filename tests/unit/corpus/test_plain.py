"""What PyTorch reports about a job by itself, from how its ranks ended and what they wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.corpus.header import Header
from tests.corpus.jobs import Job, Outcome
from tests.corpus.plain import classify

JOB = Job(Header(path=Path("x.py"), title="", expect="DDP202", ranks=(2,)), 2)


def classified(**how: Any) -> tuple[str, str]:
    answer = classify(Outcome(JOB, **{"exits": (0, 0), **how}))
    return answer.kind, answer.quote


def test_nothing() -> None:
    assert classified(stderr=("", "a line of the job's own\n")) == ("nothing", "")


@pytest.mark.parametrize(
    ("line", "quote"),
    [
        ("/a/b.py:12: UserWarning: look out", "UserWarning: look out"),
        (
            "[rank0]:[W1116 13:20:31.5 reducer.cpp:1] Warning: unused (function f)",
            "Warning: unused (function f)",
        ),
    ],
)
def test_a_warning(line: str, quote: str) -> None:
    assert classified(stderr=(line, "")) == ("a warning", quote)


def test_a_warning_that_every_job_gets_is_none() -> None:
    line = "[rank0]:[W1116 13:20:31.5 x.cpp:1] Warning: destroy_process_group() was not called"
    assert classified(stderr=(line, "")) == ("nothing", "")


def test_an_error_and_not_the_one_it_caused_elsewhere() -> None:
    second_hand = "Traceback:\nRuntimeError: [/x/pair.cc:534] Connection closed by peer [127.0.0.1]:123"
    first = "Traceback:\nValueError: no such luck"
    assert classified(exits=(1, 1), stderr=(second_hand, first)) == ("an error", "ValueError: no such luck")
    assert classified(exits=(-9, 1), stderr=("", second_hand)) == (
        "an error",
        "RuntimeError: Connection closed by peer [127.0.0.1]:123",
    )


def test_an_error_without_words() -> None:
    assert classified(exits=(0, -11)) == ("an error", "exit statuses [0, -11]")
    assert classified(exits=(), status=1) == ("an error", "exit status 1")


def test_a_hang_is_what_the_corpus_had_to_stop() -> None:
    assert classified(exits=(-15, 0), stopped=(0,)) == ("a hang", "")
    assert classified(exits=(), stopped=(0, 1), status=None) == ("a hang", "")
    assert classified(exits=(-15, 1), stopped=(0,), stderr=("", "KeyError: 3")) == ("an error", "KeyError: 3")


def test_a_long_quote_is_cut() -> None:
    _, quote = classified(exits=(1, 1), stderr=(f"ValueError: {'long ' * 100}",))
    assert len(quote) == 160
    assert quote.endswith("…")
