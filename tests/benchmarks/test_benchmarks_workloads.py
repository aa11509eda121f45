"""What the benchmarks' workloads of rows promise: how many bytes of gradients, how many of them in rows that are zero.

Without processes: ranks are simulated, as `tools.usage` does it.
"""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from tools import autocast_workloads, row_workloads, workloads
from tools.usage import Usage, find_usage
from tools.workload import Workload


def has_transformers() -> bool:
    try:
        return int(importlib.metadata.version("transformers").partition(".")[0]) >= 5
    except importlib.metadata.PackageNotFoundError:
        return False


needs_transformers = pytest.mark.skipif(not has_transformers(), reason="transformers 5 or later is not installed")
FROM_CONFIGURATIONS = ("e5", "mixtral", "qwen3_moe", "gpt2_dense", *autocast_workloads.NAMES)


def make(name: str) -> tuple[Workload, nn.Module]:
    workload = workloads.make(name, "tiny")
    torch.manual_seed(1)
    return workload, workload.build()


def dense_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def zero_fraction(model: nn.Module, usage: Usage) -> float:
    return 1 - sum(usage.row_bytes.values()) / dense_bytes(model)


def fractions(model: nn.Module, usage: Usage, ending: str) -> Mapping[str, float]:
    """The share of their rows that some rank uses, of the parameters whose names end like this."""
    found = {name: p for name, p in model.named_parameters() if name.endswith(ending)}
    assert found
    return {name: usage.row_bytes[name] / (p.numel() * p.element_size()) for name, p in found.items()}


def check_every_parameter_has_the_same_gradient_twice(workload: Workload, model: nn.Module) -> None:
    def gradients() -> list[torch.Tensor]:
        # What is left in memory must not show: a gradient that is not written is not zero.
        garbage = [torch.full_like(p, float("nan")) for p in model.parameters()]
        del garbage
        model.zero_grad(set_to_none=True)
        workload.backward(model, 1, 1)
        assert all(p.grad is not None for p in model.parameters())
        return [p.grad for p in model.parameters()]

    for first, second in zip(gradients(), gradients(), strict=True):
        assert first.isfinite().all()
        assert torch.equal(first, second)


def test_the_tables_of_movielens() -> None:
    size = row_workloads.NCF.sizes["default"]
    rows = size["users"] + size["items"]
    assert rows * 2 * size["width"] * 4 == pytest.approx(85e6, rel=0.01)
    workload, model = make("ncf")
    check_every_parameter_has_the_same_gradient_twice(workload, model)
    for usage in find_usage(workload, model, 2):
        assert usage.used == {name for name, _ in model.named_parameters()}
        assert usage.is_alike
        for share in fractions(model, usage, "users.weight").values():
            assert 0 < share <= 2 * 32 / 2000
        for share in fractions(model, usage, "items.weight").values():
            assert 0 < share <= 2 * 32 / 500
        assert zero_fraction(model, usage) > 0.9


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("density", row_workloads.DENSITIES)
def test_blocks_of_a_density(density: float, ranks: int) -> None:
    blocks = row_workloads.OmniReduce.sizes["default"]["blocks"]
    assert blocks * row_workloads.OmniReduce.block == 26_214_400
    workload, model = make(f"omnireduce:{density:g}")
    assert dense_bytes(model) == 512 * 256 * 4
    check_every_parameter_has_the_same_gradient_twice(workload, model)
    found = [zero_fraction(model, usage) for usage in find_usage(workload, model, ranks)]
    # Each rank draws its own blocks, so that a block is zero everywhere as often as independent draws leave it out.
    assert sum(found) / len(found) == pytest.approx((1 - density) ** ranks, abs=0.05)
    if ranks == 1:
        assert found == [1 - max(1, round(density * 512)) / 512] * workload.patterns


def test_a_density_that_cannot_be_is_refused() -> None:
    for density in ("0", "1.5", "-1", "nan"):
        with pytest.raises(ValueError, match="expected a density"):
            workloads.make(f"omnireduce:{density}", "tiny")
    with pytest.raises(ValueError, match="expected a size among tiny, default"):
        workloads.make("ncf", "small")
    with pytest.raises(ValueError, match=r"expected a workload among .*omnireduce"):
        workloads.make("unheard_of", "tiny")


@pytest.mark.parametrize("version", [None, "4.57.1"])
@pytest.mark.parametrize("name", FROM_CONFIGURATIONS)
def test_without_transformers_it_says_what_to_install(
    name: str, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(package: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(importlib.metadata, "version", look_up)
    with pytest.raises(ModuleNotFoundError, match="pip install 'transformers>=5'"):
        workloads.make(name, "tiny")


@needs_transformers
def test_the_words_of_e5() -> None:
    workload, model = make("e5")
    check_every_parameter_has_the_same_gradient_twice(workload, model)
    for usage in find_usage(workload, model, 2):
        assert usage.used == {name for name, _ in model.named_parameters()}
        (share,) = fractions(model, usage, "word_embeddings.weight").values()
        assert 0 < share <= 2 * 8 * 32 / 2000
        (share,) = fractions(model, usage, "position_embeddings.weight").values()
        assert share == 32 / 512
        assert set(fractions(model, usage, "intermediate.dense.weight").values()) == {1.0}


@needs_transformers
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_without_a_token_are_zero_rows(name: str) -> None:
    workload, model = make(name)
    check_every_parameter_has_the_same_gradient_twice(workload, model)
    experts = {n: p for n, p in model.named_parameters() if p.dim() == 3}
    assert len(experts) == 2 * 2  # layers, and matrices of each
    for pattern, usage in enumerate(find_usage(workload, model, 1)):
        chosen = count_chosen_experts(workload, model, pattern)
        for parameter in experts:
            share = usage.row_bytes[parameter] / (experts[parameter].numel() * 4)
            assert share * len(experts[parameter]) == pytest.approx(chosen[parameter.split(".mlp.")[0]])
        assert 0 < zero_fraction(model, usage) < 1


def count_chosen_experts(workload: Workload, model: nn.Module, pattern: int) -> dict[str, int]:
    """By layer, how many experts the router gives a token on rank 0 that counts: the last one predicts nothing."""
    found = {}
    handles = []
    for name, module in model.named_modules():
        if name.endswith(".mlp.gate"):

            def look(_module: nn.Module, _inputs: object, output: tuple[torch.Tensor, ...], name: str = name) -> None:
                found[name.split(".mlp.")[0]] = len(output[2][:-1].unique())

            handles.append(module.register_forward_hook(look))
    workload.loss(model, pattern, 0)
    for handle in handles:
        handle.remove()
    return found


@needs_transformers
def test_gpt2_has_one_zero_row() -> None:
    workload, model = make("gpt2_dense")
    check_every_parameter_has_the_same_gradient_twice(workload, model)
    for usage in find_usage(workload, model, 2):
        (share,) = fractions(model, usage, "wpe.weight").values()
        assert share == 63 / 64
        assert sum(usage.row_bytes.values()) == dense_bytes(model) - 32 * 4


@needs_transformers
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("e5", 471e6), ("mixtral", 213e6), ("qwen3_moe", 213e6), ("gpt2_dense", 65e6)),
        *(("gpt2_autocast", 65e6), ("llama_autocast", 67.7e6), ("vit_autocast", 66.7e6), ("bert_autocast", 65.8e6)),
        *(("resnet_autocast", 102.2e6), ("e5_autocast", 471e6)),
    ],
)
def test_bytes_of_the_default_size(name: str, expected: float) -> None:
    with torch.device("meta"):
        model = workloads.make(name, "default").build()
    assert dense_bytes(model) == pytest.approx(expected, rel=0.005)


def test_the_least_that_ranks_could_send_by_hand() -> None:
    workload = workloads.make("omnireduce:0.4", "tiny")
    for pattern, usage in enumerate(find_usage(workload, workload.build(), 3)):
        filled = Counter(row for rank in range(3) for row in workload._rows(pattern, rank).tolist())
        # So many contributors: all but one send theirs to that one, who sends the sum to both others.
        transfers = sum((count - 1) + 2 for count in filled.values())
        assert usage.least_bytes == pytest.approx(transfers * workload.block * 4 / 3)


# --- under autocast


def share_held_by(model: nn.Module, dtype: torch.dtype) -> float:
    """Which share of the numbers of gradients another dtype holds exactly."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return sum(int((g.to(dtype).float() == g).sum()) for g in gradients) / sum(g.numel() for g in gradients)


@needs_transformers
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", autocast_workloads.NAMES)
def test_gradients_hold_what_they_were_computed_in(name: str, dtype: str) -> None:
    workload, model = make(f"{name}:{dtype}")
    check_every_parameter_has_the_same_gradient_twice(workload, model)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    shares = {other: share_held_by(model, getattr(torch, other)) for other in ("bfloat16", "float16")}
    # Rows of the word embeddings that nobody looked up are zero, without autocast, too.
    zeros = sum(int((p.grad == 0).sum()) for p in model.parameters()) / sum(p.numel() for p in model.parameters())
    for other, share in shares.items():
        if other == dtype:
            assert share > 0.8
            assert share > zeros + 0.15
        elif dtype == "float32":
            assert share < zeros + 0.05
    if dtype == "float16":  # the loss scale keeps them from vanishing
        small = workloads.make(f"{name}:float32", "tiny")
        model.zero_grad(set_to_none=True)
        small.backward(model, 1, 1)
        really = sum(int((p.grad == 0).sum()) for p in model.parameters()) / sum(p.numel() for p in model.parameters())
        assert zeros < really + 0.02


@needs_transformers
@pytest.mark.parametrize("name", ["gpt2_autocast:bfloat16:3", "resnet_autocast:float16:2"])
def test_passes_add_up(name: str) -> None:
    workload, model = make(name)
    passes = int(name.rpartition(":")[2])
    check_every_parameter_has_the_same_gradient_twice(workload, model)
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    for number in range(passes):
        workload.loss(model, 1 + number * workload.patterns, 1).backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad)
    assert not workload.is_static


def test_names_say_dtype_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "5.0")
    labels = {
        "gpt2_autocast": "gpt2 under bfloat16",
        "vit_autocast:float16": "vit under float16",
        "llama_autocast:float32": "llama without autocast",
        "bert_autocast:bfloat16:8": "bert under bfloat16, 8 passes",
    }
    assert {name: workloads.make(name, "tiny").label for name in labels} == labels
    for wrong, why in (("int8", "expected a dtype among"), ("float16:0", "expected at least 1 pass")):
        with pytest.raises(ValueError, match=why):
            workloads.make(f"gpt2_autocast:{wrong}", "tiny")
    with pytest.raises(ValueError, match=r"expected a workload among .*gpt2_autocast"):
        workloads.make("ncf_autocast", "tiny")
