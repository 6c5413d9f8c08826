"""The mean check accepts every correct AllReduce, whatever its rounding, and detects wrong ones."""

from __future__ import annotations

import json
import math
import operator
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from ddpcheck.analysis.allreduce import mean_check as mean_check_module
from ddpcheck.analysis.allreduce.mean_check import MeanCheckResult, can_check, mean_check
from ddpcheck.probes.sketches.sketch import sketch
from ddpcheck.records.codecs import Packed, pack, unpack
from ddpcheck.records.sketch_signs import BLOCK
from tests.helpers.paths import ROOT

LARGEST = 100_000
POOL = 1 << 20
WORLDS, DTYPES = ("2", "3"), ("float32", "bfloat16")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def packed(tensors: list[torch.Tensor]) -> list[Packed]:
    return unpack(pack(map(sketch, tensors)))


def check(ranks: list[torch.Tensor], reduced: torch.Tensor, divisor: int = 0) -> MeanCheckResult:
    *local, result = packed([*ranks, reduced])
    dtype = str(reduced.dtype).removeprefix("torch.")
    return mean_check(dict(enumerate(local)), result, dtype, reduced.numel(), divisor or len(ranks))


# How an AllReduce may add: every backend does one of these, or a mixture.


def in_turn(parts: list[torch.Tensor], start: int = 0) -> torch.Tensor:
    total = parts[start]
    for step in range(1, len(parts)):
        total = total + parts[(start + step) % len(parts)]
    return total


def as_tree(parts: list[torch.Tensor]) -> torch.Tensor:
    while len(parts) > 1:
        pairs = [parts[at] + parts[at + 1] for at in range(0, len(parts) - 1, 2)]
        parts = [*pairs, *parts[2 * len(pairs) :]]
    return parts[0]


def in_ring(parts: list[torch.Tensor]) -> torch.Tensor:
    chunks = [torch.tensor_split(part, len(parts)) for part in parts]
    return torch.cat([in_turn([chunk[at] for chunk in chunks], at) for at in range(len(parts))])


ORDERS = [in_turn, as_tree, in_ring]


def all_reduced(ranks: list[torch.Tensor], order: int, division: int, divisor: int = 0) -> torch.Tensor:
    add, divisor = ORDERS[order], divisor or len(ranks)
    if division == 0:
        return add([part * (1 / divisor) for part in ranks])
    if division == 1:
        return add([part / divisor for part in ranks])
    return add(ranks) / divisor if division == 2 else add(ranks) * (1 / divisor)


# Gradients of every kind, cut from pools: creating random numbers takes longer than checking them.


@cache
def pool(kind: str) -> torch.Tensor:
    made = torch.Generator().manual_seed(len(kind))
    normal = torch.randn(POOL, generator=made, dtype=torch.float64)
    if kind == "normal":
        return normal
    spread = torch.rand(POOL, generator=made, dtype=torch.float64) * 18 - 12
    wild = torch.pow(10.0, spread) * normal.sign()
    if kind == "wild":
        return wild
    holes = torch.where(torch.rand(POOL, generator=made) < 0.7, 0.0, normal)
    return holes if kind == "holes" else normal * 1e-3 + 1


def slice_of(kind: str, size: int, dtype: torch.dtype, draw: random.Random, scale: float) -> torch.Tensor:
    reals = 2 * size if dtype.is_complex else size
    start = draw.randrange(POOL - reals)
    data = (pool(kind)[start : start + reals] * scale).to(dtype.to_real() if dtype.is_complex else dtype)
    return torch.view_as_complex(data.view(-1, 2)) if dtype.is_complex else data


KINDS = ["normal", "wild", "holes", "near one"]


def gradients(size: int, world: int, dtype: torch.dtype, draw: random.Random) -> list[torch.Tensor]:
    kind = draw.choice(KINDS)
    low, high = (-9, 3) if dtype is torch.float16 else (-12, 6)
    uneven = draw.random() < 0.5
    common = draw.uniform(low, high)
    if draw.random() < 0.05 and dtype is not torch.float16:
        common = -310 if dtype in (torch.float64, torch.complex128) else -39.0
    ranks = [
        slice_of(kind, size, dtype, draw, 10.0 ** (draw.uniform(low, high) if uneven else common))
        for _ in range(world)
    ]
    special = draw.random()
    if special < 0.1:
        ranks[0] = -ranks[-1] * (1 + 2.0**-7)  # what remains of the sum is rounding
    elif special < 0.2:
        ranks[draw.randrange(world)] = torch.zeros_like(ranks[0])
    elif special < 0.3:
        ranks = [torch.full_like(ranks[0], 10.0**common * draw.gauss(0, 1)) for _ in range(world)]
    return ranks


def sound_cases(dtype: torch.dtype, count: int) -> Iterator[MeanCheckResult]:
    draw = random.Random(f"sound {dtype}")
    for _ in range(count):
        largest = LARGEST if draw.random() < 0.1 else 3000
        size, world = round(math.exp(draw.uniform(0, math.log(largest)))), draw.randint(2, 8)
        ranks = gradients(size, world, dtype, draw)
        yield check(ranks, all_reduced(ranks, draw.randrange(3), draw.randrange(4)))


COUNTS = {
    torch.float32: 3000,
    torch.bfloat16: 2500,
    torch.float16: 2500,
    torch.float64: 1000,
    torch.complex64: 700,
    torch.complex128: 300,
}


@pytest.mark.parametrize("dtype", COUNTS, ids=str)
def test_no_false_alarm(dtype: torch.dtype) -> None:
    assert sum(COUNTS.values()) == 10_000
    outcomes = list(sound_cases(dtype, COUNTS[dtype]))
    worst = max(outcome.ratio for outcome in outcomes)
    conclusive = sum(math.isfinite(outcome.bound) for outcome in outcomes) / len(outcomes)
    print(f"{dtype}: worst ratio {worst:.3f}, {conclusive:.1%} were conclusive")
    assert worst < 1
    assert conclusive > 0.8  # sums in float16 overflow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world", [2, 3, 7])
def test_no_false_alarm_over_many_blocks(dtype: torch.dtype, world: int) -> None:
    # Equal errors in every block are the worst case for signs that repeat.
    size = 12 * BLOCK + 77
    draw = random.Random(world)
    for ranks in (
        [torch.full((size,), draw.gauss(0, 1), dtype=dtype) for _ in range(world)],
        [slice_of("near one", BLOCK, dtype, draw, 1.0).repeat(13)[:size] for _ in range(world)],
    ):
        for division in range(4):
            assert check(ranks, all_reduced(ranks, 0, division)).ok


WHOLE = ["a rank left out", "not divided", "divided twice", "not reduced"]
ELEMENT = ["0.01", "an exponent bit"]


def rates_caught(
    dtype: torch.dtype, count: int, breaks: list[str], least: float = 0.0, size: int = 0
) -> dict[str, float]:
    """Of `count` AllReduces of normal gradients, each broken in several ways, how many are detected."""
    draw = random.Random(f"broken {dtype} {breaks} {size}")
    caught = dict.fromkeys(breaks, 0)
    name = str(dtype).removeprefix("torch.")
    for _ in range(count):
        numel = size or a_size(draw)
        ranks = [slice_of("normal", numel, dtype, draw, 1.0) for _ in range(draw.randint(2, 8))]
        good = all_reduced(ranks, draw.randrange(3), draw.randrange(4))
        results = [broken(each, ranks, good, draw, least) for each in breaks]
        sketches = packed([*ranks, *results])
        local = dict(enumerate(sketches[: len(ranks)]))
        for each, result in zip(breaks, sketches[len(ranks) :], strict=True):
            caught[each] += not mean_check(local, result, name, numel, len(ranks)).ok
    rates = {each: results_of_ranks / count for each, results_of_ranks in caught.items()}
    print(f"{name}, {size or 'any'} elements, at least {least} rms: {rates}")
    return rates


def a_size(draw: random.Random) -> int:
    return round(math.exp(draw.uniform(0, math.log(LARGEST if draw.random() < 0.2 else 3000))))


def broken(
    break_it: str, ranks: list[torch.Tensor], good: torch.Tensor, draw: random.Random, least: float
) -> torch.Tensor:
    world = len(ranks)
    if break_it == "a rank left out":
        left_out = draw.randrange(world)
        return sum((r for at, r in enumerate(ranks) if at != left_out), torch.zeros_like(good)) / world
    if break_it == "not divided":
        return good * world
    if break_it == "divided twice":
        return good / world
    if break_it == "not reduced":
        return ranks[0]
    if break_it == "halves swapped":
        return good.roll(good.numel() // 2)
    bad = good.clone()
    parts = torch.view_as_real(bad).view(-1) if bad.is_complex() else bad
    at = a_place(parts, draw, least)
    if break_it == "an exponent bit":
        whole = parts.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[parts.element_size()])
        first = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}[parts.dtype]
        bits = 5 if parts.dtype is torch.float16 else 11 if parts.dtype is torch.float64 else 8
        whole[at] ^= 1 << draw.randrange(first, first + bits)
    else:
        parts[at] *= 1 + float(break_it)
    return bad


def a_place(parts: torch.Tensor, draw: random.Random, least: float) -> int:
    """One element, at least `least` times the root mean square, if there is one."""
    rms = parts.double().norm().item() / math.sqrt(parts.numel())
    for _ in range(1000):
        at = draw.randrange(parts.numel())
        if abs(parts[at].item()) >= least * rms:
            break
    return at


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_wrong_means_are_detected(dtype: torch.dtype) -> None:
    assert min(rates_caught(dtype, 1000, WHOLE).values()) >= 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_swapped_halves_are_detected(dtype: torch.dtype) -> None:
    for size in (100, 9999, LARGEST):
        assert rates_caught(dtype, 350, ["halves swapped"], size=size)["halves swapped"] == 1


def test_swapped_blocks_are_detected() -> None:
    draw = random.Random(5)
    ranks = [slice_of("normal", 3 * BLOCK, torch.float32, draw, 1.0) for _ in range(2)]
    blocks = all_reduced(ranks, 0, 0).view(3, BLOCK)
    assert check(ranks, blocks.flatten()).ok
    for order in ([0, 2, 1], [1, 0, 2], [2, 1, 0]):
        assert not check(ranks, blocks[order].flatten()).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_one_significant_element_is_detected(dtype: torch.dtype) -> None:
    assert min(rates_caught(dtype, 1500, ELEMENT, least=0.25).values()) >= 0.999


def test_one_element_of_any_size() -> None:
    # Elements near zero are off by less than the rounding of all others.
    for dtype, size, least in (
        (torch.float32, 1000, 0.97),
        (torch.float32, LARGEST, 0.85),
        (torch.float64, LARGEST, 0.998),
    ):
        assert rates_caught(dtype, 400, ELEMENT, size=size)["0.01"] >= least


# In half precision an error in one parameter may be below the bound; an error in all parameters exceeds it in many.
@pytest.mark.parametrize(("dtype", "least"), [(torch.float16, 0.9), (torch.bfloat16, 0.45)], ids=str)
def test_half_precision(dtype: torch.dtype, least: float) -> None:
    rates = rates_caught(dtype, 600, [*WHOLE, "an exponent bit"])
    assert min(rates[each] for each in WHOLE) >= least
    assert rates["not divided"] >= 0.97


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_over_a_whole_model(dtype: torch.dtype) -> None:
    """A backward of 32 parameters, all reduced wrongly in the same way: one of them is enough."""
    draw = random.Random(f"model {dtype}")
    name, models = str(dtype).removeprefix("torch."), 1000
    missed = dict.fromkeys(WHOLE, 0)
    for _ in range(models):
        world, order, division = draw.randint(2, 8), draw.randrange(3), draw.randrange(4)
        unseen = set(WHOLE)
        for _ in range(32):
            numel = round(math.exp(draw.uniform(math.log(8), math.log(3000))))
            ranks = [slice_of("normal", numel, dtype, draw, 1.0) for _ in range(world)]
            good = all_reduced(ranks, order, division)
            tried = sorted(unseen)
            sketches = packed([*ranks, *(broken(each, ranks, good, draw, 0.0) for each in tried)])
            local = dict(enumerate(sketches[:world]))
            for each, result in zip(tried, sketches[world:], strict=True):
                if not mean_check(local, result, name, numel, world).ok:
                    unseen.discard(each)
            if not unseen:
                break
        for each in unseen:
            missed[each] += 1
    print(f"{name}, models of 32 parameters, missed of {models}: {missed}")
    assert max(missed.values()) <= models // 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_divisors_that_are_not_the_number_of_contributions(dtype: torch.dtype) -> None:
    draw = random.Random(1)
    zero = torch.zeros(500, dtype=dtype)
    for divisor in range(3, 8):
        live = [slice_of("normal", 500, dtype, draw, 1.0) for _ in range(3)]
        ranks = [*live, *[zero] * (divisor - 3)]
        reduced = all_reduced(ranks, draw.randrange(3), draw.randrange(4), divisor)
        assert check(ranks, reduced, divisor).ok
        assert check(live, reduced, divisor).ok
        if dtype is not torch.bfloat16:
            assert not check(live, reduced, 2 * divisor).ok
    assert check([zero, zero], zero).ok
    assert not check([zero, zero], torch.ones_like(zero)).ok
    assert check([], zero, 4).ok


def test_values_that_are_not_finite() -> None:
    ones, bad = torch.ones(100), torch.ones(100)
    bad[7] = math.nan
    assert check([ones, bad], bad).ok
    assert not check([ones, bad], ones).ok
    assert not check([ones, ones], bad).ok
    half = torch.full((100,), 40000.0, dtype=torch.float16)
    assert check([half, half], (half + half) / 2).ok
    assert check([half, half], half).ok
    huge = torch.full((10,), 1e300, dtype=torch.float64)
    assert check([huge, huge], huge).bound == math.inf
    assert not check([ones.double(), ones.double()], huge).ok


def test_ratio() -> None:
    assert (MeanCheckResult(2.0, 4.0).ok, MeanCheckResult(2.0, 4.0).ratio) == (True, 0.5)
    assert (MeanCheckResult(1.0, 0.0).ok, MeanCheckResult(1.0, 0.0).ratio) == (False, math.inf)
    assert MeanCheckResult(0.0, 0.0).ok
    assert MeanCheckResult(math.inf, 0.0).ratio == math.inf


def test_dtypes() -> None:
    for name in ("float64", "float32", "bfloat16", "float16", "complex64", "complex128", "float8_e5m2"):
        assert can_check(name)
        real = getattr(torch, name)
        real = real.to_real() if real.is_complex else real
        number = mean_check_module._FORMATS[str(real).removeprefix("torch.")]
        assert number.roundoff == torch.finfo(real).eps / 2
        assert number.underflow >= torch.finfo(real).smallest_normal * torch.finfo(real).eps / 2
        assert number.largest <= torch.finfo(real).max
    assert not can_check("int64")


def test_the_probability_of_exceeding_the_bounds() -> None:
    few, many = mean_check_module._DEVIATIONS, mean_check_module._MOST_DEVIATIONS
    assert 2 * math.exp(-(few**2) / 2) < 1e-12
    steps = [index / 1000 for index in range(1, 100_000)]
    longer = [min(1, 2 * math.exp(-y * y / 2)) for y in steps]
    slope = [2 * many**2 / y**3 * math.exp(-((many / y) ** 2) / 2) for y in steps]
    assert math.fsum(map(operator.mul, longer, slope)) / 1000 < 1e-12


def test_no_torch_is_needed() -> None:
    script = "import sys, ddpcheck.analysis.allreduce.mean_check; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=300)


@pytest.fixture(scope="module")
def reduced_by_gloo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Sketches of all ranks, by world size and dtype. In a process of its own: ranks are forked there."""
    folder = tmp_path_factory.mktemp("reduced")
    command = [sys.executable, "-m", "tests.jobs.reduced_gradients", str(folder), *WORLDS, *DTYPES]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=300, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", WORLDS)
def test_gradients_of_a_real_job(
    world: str, dtype: str, reduced_by_gloo: dict[str, list[dict[str, Any]]]
) -> None:
    ranks = reduced_by_gloo[f"{world} {dtype}"]
    assert len({rank["reduced"] for rank in ranks}) == 1
    local = [unpack(rank["local"]) for rank in ranks]
    for number, (reduced, numel) in enumerate(
        zip(unpack(ranks[0]["reduced"]), ranks[0]["numels"], strict=True)
    ):
        by_rank = {rank: sketches[number] for rank, sketches in enumerate(local)}
        outcome = mean_check(by_rank, reduced, dtype, numel, int(world))
        print(f"{dtype}, {world} ranks, {numel} elements: {outcome.ratio:.3f} of the bound")
        assert outcome.ok
        if dtype == "float32":
            assert not mean_check(by_rank, reduced, dtype, numel, int(world) + 1).ok
