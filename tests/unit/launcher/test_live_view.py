"""The live view and its terminal."""

from __future__ import annotations

import os
import pty
from collections.abc import Iterator

import pytest

from ddpcheck.launcher import live_view
from ddpcheck.launcher.live_view import live_view_enabled

FIT = {"TERM": "xterm-256color"}


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Replaces standard output and standard error by a terminal."""
    master, slave = pty.openpty()
    monkeypatch.setattr(live_view, "_STDOUT", slave)
    monkeypatch.setattr(live_view, "_STDERR", slave)
    yield slave
    os.close(master)
    os.close(slave)


def test_on_a_terminal_unless_disabled(on_terminal: int) -> None:
    assert live_view_enabled(None, False, FIT)
    assert live_view_enabled(True, False, FIT)
    assert not live_view_enabled(False, False, FIT)
    assert not live_view_enabled(None, True, FIT)
    assert not live_view_enabled(True, True, FIT)


@pytest.mark.parametrize("name", ["", "dumb", "unknown"])
def test_never_on_unsupported_terminals(on_terminal: int, name: str) -> None:
    assert not live_view_enabled(None, False, {"TERM": name})
    assert not live_view_enabled(True, False, {"TERM": name})


@pytest.mark.parametrize("name", ["CI", "BUILDKITE", "TEAMCITY_VERSION", "JPY_PARENT_PID"])
def test_not_in_logs_unless_requested(on_terminal: int, name: str) -> None:
    assert not live_view_enabled(None, False, {**FIT, name: "1"})
    assert live_view_enabled(True, False, {**FIT, name: "1"})


def test_no_color_does_not_disable_the_view(on_terminal: int) -> None:
    assert live_view_enabled(None, False, {**FIT, "NO_COLOR": "1"})


def test_not_into_a_pipe_which_may_lead_to_a_pager(on_terminal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    monkeypatch.setattr(live_view, "_STDOUT", write_end)
    assert not live_view_enabled(None, False, FIT)
    assert live_view_enabled(True, False, FIT)
    monkeypatch.setattr(live_view, "_STDERR", write_end)
    assert not live_view_enabled(True, False, FIT)
    os.close(read_end)
    os.close(write_end)
