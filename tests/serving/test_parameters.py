"""Naming parameters: by pattern, module or one by one, however many there are."""

from __future__ import annotations

import random
import time
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn

from ddp_hooks.serving.parameters import select


class Tree(nn.Module):
    """Names that begin like another: `a`, `a.b`, `a-b`, `ab`, `a/b` and so on."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        for name in ("a", "b", "ab", "a-b", "a/b", "a[0]"):
            if depth == 0:
                self.register_parameter(name, nn.Parameter(torch.zeros(1)))
            else:
                self.add_module(name, Tree(depth - 1))


def slowly(module: nn.Module, *what: str | nn.Module | torch.Tensor) -> list[str]:
    """The obvious twin: asks each selector about each parameter."""
    chosen = []
    for name, parameter in module.named_parameters():
        for selector in what:
            if isinstance(selector, str):
                meant = fnmatchcase(name, selector) or fnmatchcase(name, f"{selector}.*")
            elif isinstance(selector, nn.Module):
                meant = any(parameter is other for other in selector.parameters())
            else:
                meant = parameter is selector
            if meant:
                chosen.append(name)
                break
    return chosen


def test_the_same_as_asking_about_each_parameter() -> None:
    tree = Tree(2)
    names = [name for name, _ in tree.named_parameters()]
    random.seed(0)
    matched = 0
    for _ in range(300):
        name = random.choice(names)
        cut = name[: random.randint(1, len(name))]
        patterns = [
            name,
            cut,
            cut.rstrip("."),
            cut + "*",
            "*" + cut[1:] + "*",
            cut[:-1] + "?",
            "[ab]." + name[2:],
            "*.a",
        ]
        what: list[str | nn.Module | torch.Tensor] = random.sample(patterns, 2)
        what += random.sample([*tree.modules()], 1) + random.sample([*tree.parameters()], 1)
        random.shuffle(what)
        what = [selector for selector in what if slowly(tree, selector)]
        matched += len(what)
        assert list(select("freeze", tree, *what)) == slowly(tree, *what), what
    assert matched > 600


def test_what_matches_nothing_is_refused() -> None:
    for nothing in ("a.", "c", "a.a.a.a", "", nn.Linear(1, 1), torch.zeros(1)):
        with pytest.raises(ValueError, match="matches none"):
            select("freeze", Tree(2), nothing)


def test_tied_parameters_are_found_by_either_module() -> None:
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    model["second"].weight = model["first"].weight
    for second in (model["second"], "second", "second.*", "*ond.*"):
        assert list(select("freeze", model, second)) == ["first.weight", "second.bias"]
    assert list(select("freeze", model, "second.weight")) == ["first.weight"]


def test_thousands_of_selectors_do_not_take_quadratic_time() -> None:
    model = nn.ModuleList(nn.ParameterList(torch.zeros(1) for _ in range(10)) for _ in range(2000))
    names = [name for name, _ in model.named_parameters()]
    start = time.perf_counter()
    for what in (names, list(model), list(model.parameters())):
        assert list(select("freeze", model, *what)) == names
    # Asking each of 20,000 names about each of 20,000 selectors takes many minutes.
    assert time.perf_counter() - start < 20
