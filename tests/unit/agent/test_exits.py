"""The reason that is recorded for the exit of a rank."""

from __future__ import annotations

import pytest

from ddpcheck.agent.install import Agent
from ddpcheck.config import Config


@pytest.fixture
def agent() -> Agent:
    return Agent(Config(run_dir="/nonexistent", run_id="test"))


def test_caught_exception_before_exit_status(agent: Agent) -> None:
    """mp.spawn pickles the exception and calls sys.exit(1)."""
    try:
        raise ValueError("bad sample")
    except ValueError:
        agent._leaving(1)
    message, where = agent._error
    assert message == "ValueError: bad sample"
    assert where.startswith(__file__)


def test_exit_status_of_the_program(agent: Agent) -> None:
    agent._leaving(3)
    assert agent._error == ("exit status 3", "")


def test_system_exit_is_not_an_exception(agent: Agent) -> None:
    try:
        raise SystemExit(4)
    except SystemExit:
        agent._leaving(4)
    assert agent._error == ("exit status 4", "")


@pytest.mark.parametrize("status", [None, 0])
def test_successful_exit_ignores_a_handled_exception(agent: Agent, status: object) -> None:
    try:
        raise ValueError("handled")
    except ValueError:
        agent._leaving(status)
    assert agent._error == ("", "")


def test_first_reason_is_kept(agent: Agent) -> None:
    agent._leaving(3)
    agent._leaving(1)
    assert agent._error[0] == "exit status 3"
