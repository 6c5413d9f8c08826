"""The course of a job over its steps, as report.json holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class AgreementStretch:
    """Steps in a row at which the same ranks agreed; step -1 is the wrapping."""

    first: int
    last: int
    # How many of these steps were compared: not all of them with --every.
    compared: int
    # Ranks that did not hold what the majority held; without a majority, all that were compared.
    odd: tuple[int, ...] = ()
    # Ranks of the group that said nothing.
    absent: tuple[int, ...] = ()
    majority: bool = True


@dataclass(frozen=True)
class AgreementHistory:
    """One module's parameters after wrapping and after each step."""

    module: str
    name: str
    ranks: tuple[int, ...]
    stretches: tuple[AgreementStretch, ...]
    # Whether there were more stretches than are kept.
    cut: bool = False
    # The lines of the user's that wrapped it, and that took its first step, as file:line.
    wrapped_at: str = ""
    stepped_at: str = ""


@dataclass(frozen=True)
class GradientHistory:
    """Norms of one module's gradients, to within a fifth; each point is the largest of `every` steps."""

    module: str
    name: str
    every: int
    steps: tuple[int, ...]
    # Before the reduction, by rank; null where nothing was sketched, or values were not finite.
    local: Mapping[str, tuple[float | None, ...]]
    # After it.
    reduced: tuple[float | None, ...]
    # Distance of the reduced gradients from the mean, over what rounding explains: above 1 it is wrong.
    off_mean: tuple[float | None, ...]


@dataclass(frozen=True)
class EnvironmentValue:
    """One value, and the ranks that have it."""

    value: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class EnvironmentRow:
    """One thing about the ranks' surroundings; one value where they are alike."""

    name: str
    values: tuple[EnvironmentValue, ...]
