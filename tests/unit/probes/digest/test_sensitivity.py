"""What changes a leaf, and what does not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from ddpcheck.probes.digest import DIGEST_SIZE, UNSUPPORTED, Digester, combine, make_digester
from ddpcheck.probes.digest.multilinear import MultilinearDigester


@pytest.fixture(params=["xxh3-128", "multilinear-128"])
def digester(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Digester:
    monkeypatch.delenv("DDPCHECK_HASH", raising=False)
    if request.param == "multilinear-128":
        return MultilinearDigester()
    pytest.importorskip("xxhash")
    return make_digester("cpu")


def leaf(digester: Digester, tensor: torch.Tensor) -> bytes:
    (only,) = digester.submit([tensor]).result()
    return only


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def test_equal_bits_give_equal_leaves_of_16_bytes(digester: Digester) -> None:
    first = leaf(digester, values(70, 90))
    assert first == leaf(digester, values(70, 90))
    assert len(first) == DIGEST_SIZE == 16


def swap_neighbours(tensor: torch.Tensor) -> None:
    tensor[10], tensor[11] = tensor[11].clone(), tensor[10].clone()


def swap_blocks(tensor: torch.Tensor) -> None:
    tensor[0:1024], tensor[1024:2048] = tensor[1024:2048].clone(), tensor[0:1024].clone()


def flip_one_sign(tensor: torch.Tensor) -> None:
    tensor[4321] *= -1


def flip_two_signs(tensor: torch.Tensor) -> None:
    tensor[5] *= -1
    tensor[1029] *= -1


def move_between(tensor: torch.Tensor) -> None:
    words = tensor.view(torch.int32)
    words[2] += 1
    words[3] -= 1


CHANGES: list[Callable[[torch.Tensor], object]] = [
    swap_neighbours,
    swap_blocks,
    flip_one_sign,
    flip_two_signs,
    move_between,
    torch.Tensor.neg_,
    torch.Tensor.zero_,
    lambda tensor: tensor.copy_(tensor.flip(0)),
    lambda tensor: tensor.copy_(tensor.roll(1)),
]


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_changes_the_leaf(digester: Digester, change: Callable[[torch.Tensor], object]) -> None:
    tensor = values(5000)
    before = leaf(digester, tensor)
    change(tensor)
    assert leaf(digester, tensor) != before


def test_any_single_bit_changes_the_leaf(digester: Digester) -> None:
    tensor = values(2500)
    words = tensor.view(torch.int32)
    leaves = {leaf(digester, tensor)}
    positions = [(word, bit) for word in (0, 1023, 1024, 2499) for bit in range(32)]
    for word, bit in positions:
        mask = torch.tensor(1 << bit).to(torch.int32)
        words[word] ^= mask
        leaves.add(leaf(digester, tensor))
        words[word] ^= mask
    assert len(leaves) == 1 + len(positions)


def test_minus_zero_and_nan_payloads_change_the_leaf(digester: Digester) -> None:
    patterns = [0, -(2**31), 0x7FC00000, 0x7FC00001]
    tensors = [torch.tensor([pattern], dtype=torch.int32).view(torch.float32) for pattern in patterns]
    assert len(set(digester.submit(tensors).result())) == len(patterns)


def test_the_number_of_zeros_counts(digester: Digester) -> None:
    tensors = [torch.zeros(count, dtype=torch.uint8) for count in range(40)]
    assert len(set(digester.submit(tensors).result())) == 40


def test_dtype_shape_and_strides_count(digester: Digester) -> None:
    base = torch.zeros(6, 8)
    tensors = [
        base,
        base.view(8, 6),
        base.view(48),
        base.view(1, 6, 8),
        base.t(),
        base.view(torch.int32),
        base.view(torch.uint8),
        base.view(torch.float64),
        torch.zeros(2, 2, 2, 2),
        torch.zeros(2, 2, 2, 2).to(memory_format=torch.channels_last),
    ]
    assert len(set(digester.submit(tensors).result())) == len(tensors)


def test_a_transposed_square_is_not_its_original(digester: Digester) -> None:
    square = values(16, 16)
    assert leaf(digester, square.t()) != leaf(digester, square)
    assert leaf(digester, square.t().contiguous()) != leaf(digester, square)


def test_strides_without_effect_do_not_count(digester: Digester) -> None:
    row = values(1, 9)
    assert leaf(digester, row.as_strided((1, 9), (1, 1))) == leaf(digester, row)
    assert leaf(digester, torch.empty(0, 5)) == leaf(digester, torch.empty(0, 7)[:, 2:])


def test_the_address_of_a_tensor_does_not_count(digester: Digester) -> None:
    buffer = values(3000)
    assert leaf(digester, buffer[7:1500]) == leaf(digester, buffer[7:1500].clone())
    assert leaf(digester, torch.nn.Parameter(buffer)) == leaf(digester, buffer)


def test_replaced_data_changes_the_leaf(digester: Digester) -> None:
    parameter = torch.nn.Parameter(values(64))
    before = leaf(digester, parameter)
    parameter.data = values(65)[1:]
    assert leaf(digester, parameter) == leaf(digester, values(65)[1:].clone()) != before
    parameter.data = parameter.data.view(8, 8)
    assert leaf(digester, parameter) == leaf(digester, values(65)[1:].view(8, 8).clone())


def test_results_come_in_the_order_of_the_tensors(digester: Digester) -> None:
    tensors = [values(count) for count in (3, 4096, 1, 0, 70000)] + [values(9, 9)[:, ::2]]
    together = digester.submit(tensors).result()
    assert together == [leaf(digester, tensor) for tensor in tensors]
    shuffled = list(range(len(tensors)))
    random.Random(1).shuffle(shuffled)
    assert digester.submit([tensors[at] for at in shuffled]).result() == [together[at] for at in shuffled]


def test_an_empty_submission_has_no_leaves(digester: Digester) -> None:
    ticket = digester.submit([])
    assert ticket.ready()
    assert ticket.result() == []


def test_combine_depends_on_leaves_order_and_number() -> None:
    a, b = bytes(16), bytes(range(16))
    roots = [combine(leaves) for leaves in ([], [a], [b], [a, a], [a, b], [b, a], [a, b, a])]
    assert len(set(roots)) == len(roots)
    assert all(len(root) == 16 for root in roots)
    assert combine([a, b]) == combine((a, b))
    assert UNSUPPORTED not in roots
