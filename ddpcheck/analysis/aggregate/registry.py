"""Collectors: each gathers what one subject needs from the records of an attempt.

A collector is a subclass of `Collector` in a file of `ddpcheck/analysis/collectors/`, or in the module `collector` of a
package in `ddpcheck.analysis` that holds more of its subject. It marks the methods that take records:

    class MemoryCollector(Collector):
        @collects(MemoryRecord)
        def add_step(self, rank: RankData, record: MemoryRecord) -> None: ...

        @collects_per_module(MemoryPartsRecord)
        def add_parts(self, rank: RankData, module: ModuleKey, record: MemoryPartsRecord) -> None: ...

Every attempt has one instance of each collector: `attempt.collector(MemoryCollector)`. The modules are discovered, so
a new collector needs no entry in any list. The order in which collectors receive a record is not defined.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from ddpcheck.records.registry import Record

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt
    from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
    from ddpcheck.analysis.aggregate.step_window import Window

_PACKAGE, _MODULE_NAME = "collectors", "collector"
_Self = TypeVar("_Self")
_Taken = TypeVar("_Taken", bound=Record)


class Collector:
    """Base class. A collector keeps a bounded amount of data, however long the job runs."""

    def __init__(self, attempt: Attempt) -> None:
        """`attempt` gives access to other collectors. Do not keep it: a cycle would delay freeing its memory."""

    # Whether `add_window` takes the regular steps of all ranks. Otherwise the other methods receive their records.
    takes_windows: ClassVar[bool] = False

    def add_window(self, window: Window) -> None:
        """Add regular steps of all ranks at once: their records are not passed to other methods."""

    def begin_rank(self, rank: RankData) -> None:
        """The header of a rank was read."""

    def end_rank(self, rank: RankData) -> None:
        """The rank wrote its last record."""

    def end(self, attempt: Attempt) -> None:
        """All records of the attempt were read."""


class Subscription(NamedTuple):
    """A method of a collector that takes records of one class."""

    method: str
    record: type[Record]
    per_module: bool


_subscriptions: dict[Callable[..., None], tuple[type[Record], bool]] = {}


def collects(
    record: type[_Taken],
) -> Callable[[Callable[[_Self, RankData, _Taken], None]], Callable[[_Self, RankData, _Taken], None]]:
    """Mark a method that takes every record of a class."""

    def mark(method: Callable[[_Self, RankData, _Taken], None]) -> Callable[[_Self, RankData, _Taken], None]:
        _subscriptions[method] = record, False
        return method

    return mark


def collects_per_module(
    record: type[_Taken],
) -> Callable[
    [Callable[[_Self, RankData, ModuleKey, _Taken], None]],
    Callable[[_Self, RankData, ModuleKey, _Taken], None],
]:
    """Mark a method that takes records of a class together with their module. The class has a field `module`.

    Records of a module that the rank has not described are skipped.
    """

    def mark(
        method: Callable[[_Self, RankData, ModuleKey, _Taken], None],
    ) -> Callable[[_Self, RankData, ModuleKey, _Taken], None]:
        _subscriptions[method] = record, True
        return method

    return mark


def _holds_collectors(module: str) -> bool:
    *_, package, name = module.split(".")
    return name == _MODULE_NAME or package == _PACKAGE


@cache
def subscriptions() -> Mapping[type[Collector], tuple[Subscription, ...]]:
    """All collectors of the analysis, and the methods of each that take records."""
    package = import_module("ddpcheck.analysis")
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    modules = [import_module(name) for name in names if _holds_collectors(name)]
    classes = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Collector) and value.__module__ == module.__name__
    ]
    return {cls: _subscriptions_of(cls) for cls in classes}


def _subscriptions_of(cls: type[Collector]) -> tuple[Subscription, ...]:
    members: dict[str, Any] = {
        name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()
    }
    return tuple(
        Subscription(name, *_subscriptions[value])
        for name, value in members.items()
        if callable(value) and value in _subscriptions
    )
