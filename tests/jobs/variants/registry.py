"""The registry of healthy jobs, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Variant = Callable[[int, int], list[Any]]
VARIANTS: dict[str, Variant] = {}
# Variants that make no sense below a world size.
LEAST_RANKS: dict[str, int] = {}


def variant(least: int = 1) -> Callable[[Variant], Variant]:
    def add(function: Variant) -> Variant:
        VARIANTS[function.__name__] = function
        LEAST_RANKS[function.__name__] = least
        return function

    return add
