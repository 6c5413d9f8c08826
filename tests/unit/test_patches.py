"""Removing patches restores the original attributes."""

from __future__ import annotations

import functools
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ddpcheck.patches import Patches, around, calling


class Base:
    def inherited(self) -> str:
        return "inherited"


class Owner(Base):
    def greet(self, name: str = "you") -> str:
        """Return a greeting."""
        return f"hello {name}"


@pytest.fixture
def patches() -> Any:
    patches = Patches()
    yield patches
    patches.remove()


def observe(calls: list[Any]) -> Any:
    return lambda original: calling(
        original, lambda *a, **k: calls.append((a[1:], k)), lambda *_, **__: calls.append("after")
    )


def test_replace_and_remove(patches: Patches) -> None:
    before = dict(vars(Owner))
    calls: list[Any] = []
    assert patches.replace(Owner, "greet", observe(calls))
    assert Owner().greet(name="me") == "hello me"
    assert calls == [((), {"name": "me"}), "after"]
    assert Owner.greet.__name__ == "greet"
    assert Owner.greet.__doc__ == "Return a greeting."
    patches.remove()
    assert dict(vars(Owner)) == before
    assert Owner().greet() == "hello you"
    assert len(calls) == 2


def test_inherited_method_is_restored(patches: Patches) -> None:
    assert patches.replace(Owner, "inherited", observe([]))
    patches.remove()
    assert "inherited" not in vars(Owner)
    assert Owner().inherited() == "inherited"


def test_second_patch_is_refused(patches: Patches) -> None:
    calls: list[Any] = []
    assert patches.replace(Owner, "greet", observe(calls))
    assert not patches.replace(Owner, "greet", observe(calls))
    assert not Patches().replace(Owner, "greet", observe(calls))
    Owner().greet()
    assert len(calls) == 2


def test_missing_attribute_is_not_patched(patches: Patches) -> None:
    assert not patches.replace(Owner, "new_in_torch_9", observe([]))
    assert not hasattr(Owner, "new_in_torch_9")


@pytest.mark.parametrize("copies_attributes", [True, False])
def test_later_patch_of_other_code_is_kept(patches: Patches, copies_attributes: bool) -> None:
    """With and without a copy of the wrapper's attributes, as functools.wraps makes it."""
    owner = SimpleNamespace(call=lambda: "original")
    patches.replace(owner, "call", lambda original: calling(original, None, None))
    own_wrapper = owner.call

    def other_wrapper() -> str:
        return "other over " + own_wrapper()

    owner.call = functools.wraps(own_wrapper)(other_wrapper) if copies_attributes else other_wrapper
    patches.remove()
    assert owner.call() == "other over original"


def test_exception_of_the_original_is_raised(patches: Patches) -> None:
    def original() -> None:
        raise KeyError("original")

    calls: list[str] = []
    wrapper = calling(original, lambda: calls.append("before"), lambda: calls.append("after"))
    with pytest.raises(KeyError, match="original"):
        wrapper()
    assert calls == ["before"]


class Maker:
    @classmethod
    def make(cls, what: str) -> tuple[type, str]:
        return cls, what

    @staticmethod
    def plain(what: str) -> str:
        return what


class Special(Maker):
    pass


def test_class_method_gets_its_class(patches: Patches) -> None:
    before = dict(vars(Maker))
    calls: list[Any] = []
    assert patches.replace(Maker, "make", observe(calls))
    assert not patches.replace(Maker, "make", observe(calls))
    assert Special.make("a") == (Special, "a")
    assert Special().make(what="b") == (Special, "b")
    assert calls == [(("a",), {}), "after", ((), {"what": "b"}), "after"]
    patches.remove()
    assert dict(vars(Maker)) == before


def test_static_method_gets_no_self(patches: Patches) -> None:
    before = dict(vars(Maker))
    calls: list[Any] = []
    assert patches.replace(Special, "plain", observe(calls))
    assert (Special.plain("a"), Special().plain("b")) == ("a", "b")
    assert len(calls) == 4
    patches.remove()
    assert dict(vars(Maker)) == before
    assert "plain" not in vars(Special)


def test_end_is_called_after_an_exception() -> None:
    calls: list[Any] = []

    def fail(number: int) -> None:
        raise ValueError(number)

    wrapper = around(fail, lambda number: number + 1, lambda *end: calls.append(end))
    with pytest.raises(ValueError, match="3"):
        wrapper(3)
    assert calls == [(4, (3,), {})]


def test_unbind_restores_other_names(patches: Patches) -> None:
    module = SimpleNamespace(load=lambda: "loaded")
    original = module.load
    patches.replace(module, "load", lambda each: calling(each, None, None))
    other = SimpleNamespace(load=module.load, save=original)
    patches.unbind(other, "load")
    patches.unbind(other, "save")
    patches.unbind(other, "missing")
    patches.remove()
    assert (module.load, other.load, other.save) == (original, original, original)


def test_function_in_two_modules_stays_one_object(patches: Patches) -> None:
    """pickle requires this: it looks up a function by the name in its defining module."""
    home, front = ModuleType("home"), ModuleType("front")

    def load() -> str:
        return "loaded"

    home.load = front.load = load  # type: ignore[attr-defined]
    for owner in (home, front):
        assert patches.replace(owner, "load", lambda each: calling(each, None, None))
    assert home.load is front.load is not load
    patches.remove()
    assert home.load is front.load is load
