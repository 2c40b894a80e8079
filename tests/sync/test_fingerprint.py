"""The hash of tensors: every bit and every position changes it, and the host does not wait."""

import struct

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ddp_trainer.sync.fingerprint import bit_sum

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
]


def random_tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64).abs() * 50).to(dtype)


def hash_of(*tensors: Tensor) -> int:
    result = bit_sum(tensors)
    assert (result.dtype, result.shape) == (torch.int64, ())
    return int(result)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_bit_changes_the_hash(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [random_tensor(dtype, 3, 5), random_tensor(dtype, 4)]
    seen = {hash_of(*tensors)}
    for tensor in tensors:
        content = tensor.view(-1).view(torch.uint8)
        for place in range(content.numel()):
            for bit in range(8):
                content[place] ^= 1 << bit
                seen.add(hash_of(*tensors))
                content[place] ^= 1 << bit
    num_bits = 8 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert len(seen) == 1 + num_bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swapped_values_and_tensors_change_the_hash(dtype: torch.dtype) -> None:
    values = torch.arange(6).to(dtype)
    swaps = {hash_of(values)}
    for first in range(6):
        for second in range(first):
            swapped = values.clone()
            swapped[[first, second]] = values[[second, first]]
            swaps.add(hash_of(swapped))
    assert len(swaps) == 1 + 15
    a = torch.tensor([1, 0, 0, 1]).to(dtype)
    b = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert hash_of(a, b) != hash_of(b, a)


def test_a_swap_of_opposite_numbers_changes_the_hash() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        values = torch.tensor([1.5, -1.5], dtype=dtype)
        assert hash_of(values) != hash_of(-values)


def test_it_is_a_sum_of_words_times_odd_numbers_modulo_2_64() -> None:
    tensor = torch.tensor([1.0, -0.0, float("nan")])
    words = struct.unpack("<3i", struct.pack("<3f", *tensor.tolist()))
    weights = [hash_of(torch.eye(3, dtype=torch.int32)[place]) for place in range(3)]
    assert all(weight % 2 == 1 for weight in weights)
    assert len(set(weights)) == 3
    expected = sum(word * weight for word, weight in zip(words, weights, strict=True))
    assert (hash_of(tensor) - expected) % 2**64 == 0


def test_the_layout_in_memory_changes_nothing() -> None:
    images = random_tensor(torch.float32, 2, 3, 4, 5)
    channels_last = images.to(memory_format=torch.channels_last)
    assert hash_of(channels_last) == hash_of(images)
    assert hash_of(images.transpose(1, 2)) != hash_of(images)
    assert hash_of(torch.tensor(3.0), torch.zeros(0)) == hash_of(torch.tensor([3.0]))


def test_a_gpu_is_not_waited_for() -> None:
    with FakeTensorMode():  # raises where a number would be read from the device
        result = bit_sum([torch.empty(3, 4, device="cuda"), torch.empty((), device="cuda")])
    assert (result.device.type, result.dtype) == ("cuda", torch.int64)
