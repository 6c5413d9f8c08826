"""Which modules have lines, and how they are told apart."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.analysis.timeseries.history import MOST_MODULES


def modules_shown(attempt: Attempt) -> list[ModuleKey]:
    return attempt.modules()[:MOST_MODULES]


def module_label(attempt: Attempt, module: ModuleKey) -> str:
    """Nothing where there is but one."""
    modules = attempt.modules()
    return f"module {modules.index(module)}" if len(modules) > 1 else ""
