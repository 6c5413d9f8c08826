"""Patches come out as they went in."""

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
        """Says hello."""
        return f"hello {name}"


@pytest.fixture
def patches() -> Any:
    patches = Patches()
    yield patches
    patches.remove()


def observe(seen: list[Any]) -> Any:
    return lambda original: calling(
        original, lambda *a, **k: seen.append((a[1:], k)), lambda *_, **__: seen.append("after")
    )


def test_in_and_out_again(patches: Patches) -> None:
    before = dict(vars(Owner))
    seen: list[Any] = []
    assert patches.replace(Owner, "greet", observe(seen))
    assert Owner().greet(name="me") == "hello me"
    assert seen == [((), {"name": "me"}), "after"]
    assert Owner.greet.__name__ == "greet"
    assert Owner.greet.__doc__ == "Says hello."
    patches.remove()
    assert dict(vars(Owner)) == before
    assert Owner().greet() == "hello you"
    assert len(seen) == 2


def test_an_inherited_method_is_inherited_again(patches: Patches) -> None:
    assert patches.replace(Owner, "inherited", observe([]))
    patches.remove()
    assert "inherited" not in vars(Owner)
    assert Owner().inherited() == "inherited"


def test_nothing_is_patched_twice(patches: Patches) -> None:
    seen: list[Any] = []
    assert patches.replace(Owner, "greet", observe(seen))
    assert not patches.replace(Owner, "greet", observe(seen))
    assert not Patches().replace(Owner, "greet", observe(seen))
    Owner().greet()
    assert len(seen) == 2


def test_what_this_torch_does_not_have_is_left_out(patches: Patches) -> None:
    assert not patches.replace(Owner, "new_in_torch_9", observe([]))
    assert not hasattr(Owner, "new_in_torch_9")


@pytest.mark.parametrize("careful", [True, False])
def test_a_patch_on_top_of_ours_stays(patches: Patches, careful: bool) -> None:
    """Whether or not it copies our attributes, as functools.wraps does."""
    owner = SimpleNamespace(call=lambda: "original")
    patches.replace(owner, "call", lambda original: calling(original, None, None))
    ours = owner.call

    def theirs() -> str:
        return "theirs over " + ours()

    owner.call = functools.wraps(ours)(theirs) if careful else theirs
    patches.remove()
    assert owner.call() == "theirs over original"


def test_an_exception_is_the_originals(patches: Patches) -> None:
    def original() -> None:
        raise KeyError("theirs")

    seen: list[str] = []
    wrapper = calling(original, lambda: seen.append("before"), lambda: seen.append("after"))
    with pytest.raises(KeyError, match="theirs"):
        wrapper()
    assert seen == ["before"]


class Maker:
    @classmethod
    def make(cls, what: str) -> tuple[type, str]:
        return cls, what

    @staticmethod
    def plain(what: str) -> str:
        return what


class Special(Maker):
    pass


def test_a_class_method_still_knows_its_class(patches: Patches) -> None:
    before = dict(vars(Maker))
    seen: list[Any] = []
    assert patches.replace(Maker, "make", observe(seen))
    assert not patches.replace(Maker, "make", observe(seen))
    assert Special.make("a") == (Special, "a")
    assert Special().make(what="b") == (Special, "b")
    assert seen == [(("a",), {}), "after", ((), {"what": "b"}), "after"]
    patches.remove()
    assert dict(vars(Maker)) == before


def test_a_static_method_gets_no_self(patches: Patches) -> None:
    before = dict(vars(Maker))
    seen: list[Any] = []
    assert patches.replace(Special, "plain", observe(seen))
    assert (Special.plain("a"), Special().plain("b")) == ("a", "b")
    assert len(seen) == 4
    patches.remove()
    assert dict(vars(Maker)) == before
    assert "plain" not in vars(Special)


def test_the_end_is_seen_of_what_raises() -> None:
    seen: list[Any] = []

    def fail(number: int) -> None:
        raise ValueError(number)

    wrapper = around(fail, lambda number: number + 1, lambda *end: seen.append(end))
    with pytest.raises(ValueError, match="3"):
        wrapper(3)
    assert seen == [(4, (3,), {})]


def test_a_wrapper_that_was_bound_elsewhere_comes_out_too(patches: Patches) -> None:
    module = SimpleNamespace(load=lambda: "loaded")
    original = module.load
    patches.replace(module, "load", lambda each: calling(each, None, None))
    other = SimpleNamespace(load=module.load, save=original)
    patches.unbind(other, "load")
    patches.unbind(other, "save")
    patches.unbind(other, "missing")
    patches.remove()
    assert (module.load, other.load, other.save) == (original, original, original)


def test_one_function_in_two_modules_stays_one(patches: Patches) -> None:
    """As pickle asks of `torch.load`: it goes by the name in the module that the function says it is from."""
    home, front = ModuleType("home"), ModuleType("front")

    def load() -> str:
        return "loaded"

    home.load = front.load = load  # type: ignore[attr-defined]
    for owner in (home, front):
        assert patches.replace(owner, "load", lambda each: calling(each, None, None))
    assert home.load is front.load is not load
    patches.remove()
    assert home.load is front.load is load
