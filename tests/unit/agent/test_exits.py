"""What a rank's end is put down to."""

from __future__ import annotations

import pytest

from ddpcheck.agent.install import Agent
from ddpcheck.config import Config


@pytest.fixture
def agent() -> Agent:
    return Agent(Config(run_dir="/nonexistent", run_id="test"))


def test_a_launcher_that_catches_and_leaves_by_a_status(agent: Agent) -> None:
    """As mp.spawn does: it pickles the error, and calls sys.exit(1)."""
    try:
        raise ValueError("bad sample")
    except ValueError:
        agent._leaving(1)
    said, where = agent._error
    assert said == "ValueError: bad sample"
    assert where.startswith(__file__)


def test_a_status_of_the_users_own(agent: Agent) -> None:
    agent._leaving(3)
    assert agent._error == ("exit status 3", "")


def test_a_sys_exit_that_passes_through_is_no_error_of_its_own(agent: Agent) -> None:
    try:
        raise SystemExit(4)
    except SystemExit:
        agent._leaving(4)
    assert agent._error == ("exit status 4", "")


@pytest.mark.parametrize("status", [None, 0])
def test_a_good_end_is_no_error_also_after_one_that_was_dealt_with(agent: Agent, status: object) -> None:
    try:
        raise ValueError("not bad at all")
    except ValueError:
        agent._leaving(status)
    assert agent._error == ("", "")


def test_the_first_word_counts(agent: Agent) -> None:
    agent._leaving(3)
    agent._leaving(1)
    assert agent._error[0] == "exit status 3"
