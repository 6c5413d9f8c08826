"""Settings for all tests."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

# Speed is measured side by side in benchmarks/, never by a test: the machine may be busy with others.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Whoever starts the tests in the background may have told them to ignore signals (`nohup`, `&` in a script). Programs
# that the tests start would inherit that, and some tests are about signals.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that run real jobs first: at the end, what is short keeps all workers busy until none has anything left."""
    items.sort(key=lambda item: "integration" not in item.path.parts)
