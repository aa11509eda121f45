"""gather_tensors and scatter_tensors against torch's own copies and division, bit for bit."""

from __future__ import annotations

import pytest
import torch

from ddp_hooks import _C
from ddp_hooks.sync.messages import cut

# Around the length from which stores go past the caches (128 KiB), and with a head and a tail outside cache lines.
NUMELS = [1, 15, 16, 17, 1000, 32 * 1024 - 1, 32 * 1024, 32 * 1024 + 1, 100_003]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def make_tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    """Contiguous, at odd addresses, strided, channels last, scalar and empty."""
    generator = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randint(0, 100, shape, generator=generator).to(dtype)

    tensors = [rand(numel) for numel in NUMELS]
    tensors += [rand(numel + 3)[3:] for numel in NUMELS]
    return [
        *tensors,
        rand(300, 200).t(),
        rand(4, 3, 5, 5).to(memory_format=torch.channels_last),
        rand(400, 400)[::2, ::3],
        rand(),
        rand(0, 4),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_copies_are_the_bits_of_torchs_copies(dtype: torch.dtype) -> None:
    tensors = make_tensors(dtype)
    staging = torch.zeros(sum(tensor.numel() for tensor in tensors), dtype=dtype)
    _C.gather_tensors(staging, tensors)
    assert torch.equal(bits(staging), bits(torch.cat([tensor.reshape(-1) for tensor in tensors])))

    received = [torch.zeros_like(tensor, memory_format=torch.preserve_format) for tensor in tensors]
    _C.scatter_tensors(staging, received)
    for actual, wanted in zip(received, tensors, strict=True):
        assert torch.equal(bits(actual), bits(wanted))


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 1024])
@pytest.mark.parametrize("wire_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_quotients_are_the_bits_of_torchs_quotients(dtype: torch.dtype, wire_dtype: torch.dtype, divisor: int) -> None:
    tensors = make_tensors(dtype)
    staging = torch.randn(sum(tensor.numel() for tensor in tensors), dtype=wire_dtype)
    tiny = torch.finfo(wire_dtype).smallest_normal
    staging[:8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, tiny, tiny / 4, -3 * tiny])
    expected = [(piece / divisor).to(dtype) for piece in cut(staging.clone(), tensors)]
    _C.scatter_tensors(staging, tensors, divisor)
    for actual, wanted in zip(tensors, expected, strict=True):
        assert torch.equal(bits(actual), bits(wanted))


def test_only_the_tensors_are_written_and_autograd_sees_it() -> None:
    memory = torch.zeros(100_000)
    tensor = memory[5:90_000]
    version = tensor._version
    _C.scatter_tensors(torch.ones(tensor.numel()), [tensor])
    assert tensor._version > version
    assert tensor.eq(1).all()
    assert memory[:5].eq(0).all()
    assert memory[90_000:].eq(0).all()


def test_what_does_not_fit_is_refused() -> None:
    for staging in (torch.zeros(5), torch.zeros(2, 2), torch.zeros(8)[::2]):
        with pytest.raises(RuntimeError, match="staging buffer"):
            _C.gather_tensors(staging, [torch.zeros(4)])
        with pytest.raises(RuntimeError, match="staging buffer"):
            _C.scatter_tensors(staging, [torch.zeros(4)])
    for divisor, dtype in ((0, torch.float32), (2, torch.int64), (2, torch.float16)):
        with pytest.raises(RuntimeError, match="expected to divide"):
            _C.scatter_tensors(torch.zeros(4, dtype=dtype), [torch.zeros(4, dtype=dtype)], divisor)
