"""Averaging unmanaged gradients over more ranks than there are processes: the test is the group, and sums."""

from __future__ import annotations

import random

import pytest
import torch

from ddp_hooks_testing import _C as testing

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 300, 4096])
def test_what_no_rank_used_is_left_alone(ranks: int, dtype: torch.dtype) -> None:
    everyone = list(range(ranks))
    users = [everyone, everyone[-1:], []]
    parameters = [torch.zeros(3, dtype=dtype, requires_grad=True) for _ in users]
    messages: list[torch.Tensor] = []
    for rank in everyone:
        gradients = [(parameter, rank in who) for parameter, who in zip(parameters, users, strict=True)]
        testing.average_unmanaged_gradients(messages.append, rank, ranks, gradients, 1 / ranks, False)
    # In any order, and each step rounded to the dtype, as a ring does.
    random.Random(ranks).shuffle(messages)
    total = messages[0].clone()
    for message in messages[1:]:
        total += message

    mine = [torch.randn(3, dtype=dtype) for _ in users]
    for parameter, gradient in zip(parameters, mine, strict=True):
        parameter.grad = gradient.clone()

    def all_reduce(message: torch.Tensor) -> None:
        message[-len(users) :] = total[-len(users) :]  # everybody else's gradients are zeros

    sent, gradient_bytes, flag_bytes = testing.average_unmanaged_gradients(
        all_reduce,
        0,
        ranks,
        [(parameter, 0 in who) for parameter, who in zip(parameters, users, strict=True)],
        1 / ranks,
        True,
    )
    for parameter, gradient, who in zip(parameters, mine, users, strict=True):
        assert torch.equal(parameter.grad, gradient * (1 / ranks) if who else gradient)
    numbers = 2 if dtype.is_complex else 1
    assert sent == 1
    assert gradient_bytes == sum(parameter.nbytes for parameter in parameters)
    assert flag_bytes == len(users) * total.element_size()
    assert total.numel() == len(users) * (3 * numbers + 1)
