"""Settings for all tests."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

from tests.helpers.fake_device import fake_device as fake_device
from tests.helpers.requirements import all_required, missing

# No test measures speed, because other programs may load the machine; benchmarks/ compares speeds side by side.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A test run that was started in the background (`nohup`, `&` in a script) may have inherited ignored signals. Programs
# that the tests start would inherit them too, and some tests are about signals.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "needs(name): skipped where the machine lacks this; see tests/helpers/requirements.py"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        for need in marker.args:
            if reason := missing(need):
                (pytest.fail if all_required() else pytest.skip)(reason)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that run real jobs first: the short ones at the end keep all workers busy."""
    items.sort(key=lambda item: "integration" not in item.path.parts)
