"""Averaging unmanaged gradients over more ranks than there are processes: the test is the group, and sums."""

from __future__ import annotations

import random

import pytest
import torch

from ddp_hooks_testing import _C as testing

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64]


def messages_of(ranks: int, parameters: list[torch.Tensor], users: list[list[int]]) -> list[torch.Tensor]:
    """Return what each rank hands to the group, with zeros for gradients."""
    messages: list[torch.Tensor] = []
    sets = [set(who) for who in users]
    for rank in range(ranks):
        gradients = [(parameter, rank in who) for parameter, who in zip(parameters, sets, strict=True)]
        testing.average_unmanaged_gradients(messages.append, rank, ranks, gradients, 0, False)
    return messages


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 256, 257, 300, 600, 2049, 4096])
def test_contributors_are_counted(ranks: int, dtype: torch.dtype) -> None:
    everyone, order = list(range(ranks)), random.Random(ranks)
    users = [everyone, everyone[::3], everyone[-1:], []]
    parameters = [torch.zeros(3, dtype=dtype, requires_grad=True) for _ in users]
    messages = messages_of(ranks, parameters, users)
    assert len({message.numel() for message in messages}) == 1
    # In any order, and each step rounded to the dtype, as a ring does.
    order.shuffle(messages)
    total = messages[0].clone()
    for message in messages[1:]:
        total += message

    mine = [torch.randn(3, dtype=dtype) for _ in users]
    for parameter, gradient in zip(parameters, mine, strict=True):
        parameter.grad = gradient.clone()
    elements = sum(torch.view_as_real(p).numel() if dtype.is_complex else p.numel() for p in parameters)
    counts = slice(elements, (elements + total.numel()) // 2)

    def all_reduce(message: torch.Tensor) -> None:
        # Everybody else's gradients are zeros, and nobody else adds one that an earlier pass has left.
        message[counts] = total[counts]

    sent, gradient_bytes, flag_bytes = testing.average_unmanaged_gradients(
        all_reduce, 0, ranks, [(parameter, 0 in who) for parameter, who in zip(parameters, users, strict=True)], 0, True
    )
    for parameter, gradient, who in zip(parameters, mine, users, strict=True):
        # Complex numbers travel, and are divided, as their real view.
        assert parameter.grad is not None
        received, own = (torch.view_as_real(t) if dtype.is_complex else t for t in (parameter.grad, gradient))
        # Nobody counts who is in a gradient that is left of an earlier pass.
        divisor = len(who) if 0 in who else ranks
        assert torch.equal(received, own / divisor if who else own)
    assert (sent, gradient_bytes) == (1, elements * total.element_size())
    # Two numbers for each parameter, and more only where the dtype would not count so far.
    counts_to = {torch.bfloat16: 256, torch.float16: 2048}.get(dtype, ranks)
    assert flag_bytes == 2 * 4 * -(-ranks // counts_to) * total.element_size()
