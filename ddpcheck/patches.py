"""Patches of attributes: applied and removed symmetrically, marked, with the original kept."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

from ddpcheck import torch_compat
from ddpcheck.guard import GUARD, Hiding

_MARK = "__ddpcheck_original__"
_INHERITED = object()
_DISABLED_MARK = "_torchdynamo_disable"

Wrapper = Callable[..., Any]


class Patches:
    """A set of replaced attributes."""

    def __init__(self) -> None:
        # Owner, name, our wrapper, and the original where the owner itself held it.
        self._applied: list[tuple[Any, str, Wrapper, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Wrapper], *, on_top: bool = False) -> bool:
        """Replace `owner.name` with `make(original)`; False if there is no such attribute.

        An attribute that ddpcheck has replaced is left alone, unless `on_top`: then this patch has to be removed first.
        """
        original = getattr(owner, name, None)
        if original is None or (hasattr(original, _MARK) and not on_top):
            return False
        own = vars(owner).get(name, _INHERITED)
        kind = type(inspect.getattr_static(owner, name, None))
        # A class method must be called with the subclass that it is looked up on, not with the owner.
        original = original.__func__ if kind is classmethod else original
        wrapper = self._existing_wrapper(owner, original) or _wrapped(original, make, kind)
        setattr(owner, name, wrapper)
        self._applied.append((owner, name, wrapper, own))
        return True

    def _existing_wrapper(self, owner: Any, original: Any) -> Wrapper | None:
        """The existing wrapper of a function that two modules export: pickle requires that it stays one object."""
        if not isinstance(owner, ModuleType):
            return None
        wrappers = (wrapper for owner, _, wrapper, _ in self._applied if isinstance(owner, ModuleType))
        return next((wrapper for wrapper in wrappers if getattr(wrapper, _MARK, None) is original), None)

    def remove(self) -> None:
        for owner, name, wrapper, own in reversed(self._applied):
            # Other code may have patched our wrapper: its patch calls ours and must stay. The mark does not help here,
            # since functools.wraps copies it to the other patch.
            if vars(owner).get(name) is not wrapper:
                continue
            if own is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
        self._applied.clear()

    def unbind(self, owner: Any, name: str) -> None:
        """Restore the original where our wrapper was bound to another name, as by `from x import y`."""
        bound = vars(owner).get(name)
        for _, _, wrapper, own in self._applied:
            if bound is wrapper and own is not _INHERITED:
                setattr(owner, name, own)


def _wrapped(original: Any, make: Callable[[Any], Wrapper], kind: type) -> Any:
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _MARK, original)
    return kind(wrapper) if kind in (classmethod, staticmethod) else wrapper


def constructing(
    original: Any,
    before: Callable[..., object],
    after: Callable[..., object],
    failed: Callable[[Any], object],
) -> Wrapper:
    """The constructor `original` with observers; `failed` gets the instance whose constructor raised."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        try:
            original(self, *args, **kwargs)
        except BaseException:
            failed(self)
            raise
        after(self, *args, **kwargs)

    return wrapper


def calling(
    original: Any, before: Callable[..., object] | None, after: Callable[..., object] | None
) -> Wrapper:
    """`original` with observers that are called with its arguments."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = original(*args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return result

    return wrapper


def attempting(
    original: Any, before: Callable[..., object], after: Callable[..., object], failed: Callable[[], object]
) -> Wrapper:
    """`calling`, with an observer of calls that raise."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            failed()
            raise
        after(*args, **kwargs)
        return result

    return wrapper


def returning(original: Any, returned: Callable[..., object]) -> Wrapper:
    """`original` with an observer that is called with its result and its arguments."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        returned(result, *args, **kwargs)
        return result

    return wrapper


def around(
    original: Any, begin: Callable[..., Any], end: Callable[[Any, tuple[Any, ...], dict[str, Any]], object]
) -> Wrapper:
    """`original` between `begin` and `end`. `end` gets the result of `begin`, also if `original` raises."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        begun = begin(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            end(begun, args, kwargs)

    return wrapper


def around_next(original: Wrapper, requested: Wrapper, received: Wrapper, exhausted: Wrapper) -> Wrapper:
    """`__next__` of a data loader's iterator; `received` sees the batch that it returns."""

    def __next__(iterator: Any) -> Any:
        requested(iterator)
        try:
            batch = original(iterator)
        except StopIteration:
            exhausted(iterator)
            raise
        received(iterator, batch)
        return batch

    return __next__


def around_next_index(original: Wrapper, drawn: Wrapper, exhausted: Wrapper) -> Wrapper:
    """`_next_index` of a data loader's iterator, with observers that see the indices it returns."""

    def next_index(iterator: Any) -> Any:
        try:
            index = original(iterator)
        except StopIteration:
            exhausted(iterator)
            raise
        drawn(iterator, index)
        return index

    return next_index


def hide_from_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, excluded from what torch.compile traces; unchanged if no compiler is loaded."""
    disable = torch_compat.lookup(torch_compat.DYNAMO_DISABLE)
    if disable is None:
        return function
    hidden: Callable[..., Any] = disable(function)
    active = torch_compat.lookup(torch_compat.DYNAMO_CALLBACK)
    if active is None or not _disabled_marks(hidden):
        return hidden

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # torch's wrapper takes two microseconds. It is needed only while a compiler watches the calls of this thread.
        return function(*args, **kwargs) if active() is None else hidden(*args, **kwargs)

    _mark_as(hidden, call)
    return call


def hidden_entry(probe: str, name: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """An entry point that the training thread calls several times per step, excluded from what torch.compile traces."""
    disable = torch_compat.lookup(torch_compat.DYNAMO_DISABLE)
    active = torch_compat.lookup(torch_compat.DYNAMO_CALLBACK)
    if disable is None or active is None:
        return hide_from_compiler(GUARD.protect(probe, name, body, timed=True))
    # One function less per call than with `hide_from_compiler`.
    entry = GUARD.protect(probe, name, body, timed=True, hiding=Hiding(active, disable))
    _mark_as(disable(entry), entry)
    return entry


def _disabled_marks(hidden: Callable[..., Any]) -> dict[str, Any]:
    return {name: value for name, value in vars(hidden).items() if name.startswith(_DISABLED_MARK)}


def _mark_as(hidden: Callable[..., Any], function: Callable[..., Any]) -> None:
    """The compiler recognises torch's wrapper by these attributes and does not trace it."""
    vars(function).update(_disabled_marks(hidden))
    skip_frame(function)


def skip_frame(function: Callable[..., Any]) -> None:
    """Make torch.compile skip this frame but compile what it calls."""
    skip = torch_compat.lookup(torch_compat.DYNAMO_SKIP)
    if skip is not None:
        skip(function.__code__)


def leave_out_wrappers(trace: TracebackType | None) -> None:
    """Remove our wrappers from the traceback of an uncaught error."""
    while trace is not None and trace.tb_next is not None:
        if trace.tb_next.tb_frame.f_code.co_filename == __file__:
            trace.tb_next = trace.tb_next.tb_next
        else:
            trace = trace.tb_next
