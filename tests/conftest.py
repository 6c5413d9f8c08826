"""Settings for all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

# Speed is measured side by side in benchmarks/, never by a test: the machine may be busy with others.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Whoever starts the tests in the background may have told them to ignore signals (`nohup`, `&` in a script). Programs
# that the tests start would inherit that, and some tests are about signals.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
