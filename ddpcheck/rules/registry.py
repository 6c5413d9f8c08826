"""Finds the rules: every module `ddpNNN` in a package below `ddpcheck.rules`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from ddpcheck import rules as package
from ddpcheck.rules.rule import Need, Rule


@cache
def rules() -> tuple[Rule, ...]:
    """All rules, sorted by code."""
    return tuple(sorted(_discovered(), key=lambda rule: rule.code))


def in_report_order() -> tuple[Rule, ...]:
    """All rules, causes before their effects."""
    return tuple(sorted(rules(), key=lambda rule: rule.position))


def rule_of(code: str) -> Rule | None:
    """None for a code of another version of ddpcheck."""
    return next((rule for rule in rules() if rule.code == code), None)


def is_about(code: str, need: Need) -> bool:
    """Whether the findings of `code` are based on `need`, for example on the memory section of a report."""
    rule = rule_of(code)
    return rule is not None and need in rule.needs


def _discovered() -> Iterator[Rule]:
    for group in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not group.ispkg:
            continue
        folder = importlib.import_module(group.name)
        for file in pkgutil.iter_modules(folder.__path__, f"{group.name}."):
            if file.name.rpartition(".")[2].startswith("ddp"):
                module = importlib.import_module(file.name)
                yield replace(module.RULE, find=module.find)
