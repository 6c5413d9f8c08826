"""All rules, in the order in which their findings are listed."""

from __future__ import annotations

from collections.abc import Callable

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding
from ddpcheck.rules.data import ddp301, ddp302, ddp303, ddp304, ddp305, ddp306
from ddpcheck.rules.divergence import (
    ddp201,
    ddp202,
    ddp203,
    ddp204,
    ddp205,
    ddp206,
    ddp207,
    ddp208,
    ddp209,
    ddp210,
)
from ddpcheck.rules.job import ddp601, ddp602, ddp603, ddp604, ddp605
from ddpcheck.rules.memory import ddp501, ddp502
from ddpcheck.rules.performance import ddp401, ddp402, ddp403, ddp404, ddp405
from ddpcheck.rules.wrapping import ddp101, ddp102, ddp103, ddp104

Rule = Callable[[RuleContext], list[Finding]]

RULES: tuple[Rule, ...] = tuple(
    rule.find
    for rule in (
        ddp103,
        ddp101,
        ddp104,
        ddp202,
        ddp203,
        ddp205,
        ddp204,
        ddp206,
        ddp207,
        ddp208,
        ddp201,
        ddp210,
        ddp304,
        ddp209,
        ddp301,
        ddp302,
        ddp303,
        ddp305,
        ddp306,
        ddp405,
        ddp403,
        ddp402,
        ddp602,
        ddp603,
        ddp601,
        ddp604,
        ddp501,
        ddp102,
        ddp502,
        ddp605,
        ddp401,
        ddp404,
    )
)
