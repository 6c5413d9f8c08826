"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# Speed is measured side by side in benchmarks/, never by a test: the machine may be busy with others.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
