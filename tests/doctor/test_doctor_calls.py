"""Functions of torch's that are wrapped while somebody listens."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint

from ddp_hooks.doctor.torch_calls import follow_broken_backward, follow_severed_checkpoints, modules_of


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("planted")


def test_an_error_of_backward_is_told_and_goes_on() -> None:
    heard: list[Exception] = []
    before = torch.autograd.backward
    stops = [follow_broken_backward(heard.append), follow_broken_backward(heard.append)]
    x = torch.ones(2, requires_grad=True)
    x.sum().backward()
    assert heard == []
    with pytest.raises(ValueError, match="planted"):
        Failing.apply(x).sum().backward()
    assert [str(error) for error in heard] == ["planted", "planted"]
    stops[0]()
    assert torch.autograd.backward is not before
    stops[1]()
    stops[1]()
    assert torch.autograd.backward is before


def test_what_others_have_put_over_it_stays() -> None:
    heard: list[Exception] = []
    before = torch.autograd.backward
    stop = follow_broken_backward(heard.append)
    ours = torch.autograd.backward

    def theirs(*args: Any, **options: Any) -> None:
        ours(*args, **options)

    torch.autograd.backward = theirs
    try:
        stop()
        assert torch.autograd.backward is theirs
        with pytest.raises(ValueError, match="planted"):
            Failing.apply(torch.ones(2, requires_grad=True)).sum().backward()
        assert heard == []
    finally:
        torch.autograd.backward = before


def test_a_checkpoint_without_gradient_is_told() -> None:
    heard: list[Any] = []
    stop = follow_severed_checkpoints(heard.append)
    layer = nn.Linear(2, 2)
    checkpoint.checkpoint(layer, torch.ones(1, 2, requires_grad=True), use_reentrant=True)
    checkpoint.checkpoint(layer, torch.ones(1, 2), use_reentrant=False)
    assert heard == []
    with pytest.warns(UserWarning, match="None of the inputs"):
        checkpoint.checkpoint(layer, torch.ones(1, 2), use_reentrant=True)
    stop()
    with pytest.warns(UserWarning, match="None of the inputs"):
        checkpoint.checkpoint(layer, torch.ones(1, 2), use_reentrant=True)
    assert heard == [layer]


def test_modules_of_functions_are_found() -> None:
    layer = nn.Linear(2, 2)
    assert modules_of(layer) == [layer]
    assert modules_of(layer.forward) == [layer]
    assert modules_of(lambda x: layer(x)) == [layer]
    assert modules_of(functools.partial(layer.forward, 1)) == [layer]
    assert modules_of(functools.partial(print, layer)) == [layer]
    assert modules_of(print) == []
    assert modules_of(None) == []
