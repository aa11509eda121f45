"""The part of micro.py about coded messages: bits per value of some kinds of gradients, and the speed of the codec."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tools import harness

VALUES = 8 << 20  # of each kind, repeated if a model has fewer; fit into no cache of a core's own
BATCHES = 12  # a model takes so many steps before its gradients are coded

Call = Callable[[], Any]


def run_coding(rounds: int) -> list[dict[str, Any]]:
    """Encode, decode and add, on one thread, in turns with a `copy_` of as many bytes."""
    import torch

    torch.set_num_threads(1)
    return [row for kind, flat in _kinds() for row in _time_kind(kind, _repeated(flat), rounds)]


def _kinds() -> Iterator[tuple[str, Any]]:
    """Yield gradients of small models, flat, with a name."""
    import torch

    mlp = _gradients(_mlp(), autocast=False, ranks=1)[0]
    plain = _gradients(_transformer(), autocast=False, ranks=1)[0]
    short = _gradients(_transformer(), autocast=True, ranks=4)
    yield "transformer", plain
    yield "transformer, autocast", short[0]
    yield "transformer, autocast, sum of 2", short[0] / 2 + short[1] / 2
    yield "transformer, autocast, sum of 4", sum(each / 4 for each in short)
    yield "MLP with ReLU", mlp
    yield "transformer in bfloat16", plain.bfloat16()
    yield "transformer in float16", (plain * 1024).half()
    yield "transformer in float64, computed in float32", plain.double()
    yield "random bits", torch.randint(-(1 << 31), (1 << 31) - 1, (VALUES,), dtype=torch.int32).view(torch.float32)
    yield "zeros", torch.zeros(VALUES)


def _mlp() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 64)), lambda generator: torch.randn(8, 256, generator=generator)


def _transformer() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(512, 256), nn.TransformerEncoder(layer, 4), nn.Linear(256, 512))
    return model, lambda generator: torch.randint(512, (4, 64), generator=generator)


def _gradients(model_and_data: Any, *, autocast: bool, ranks: int) -> list[Any]:
    """Return the gradients of a model's last step, one tensor for each rank's data."""
    import torch

    model, batch = model_and_data
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(BATCHES):
        found = []
        for rank in range(ranks):
            generator = torch.Generator().manual_seed(step * ranks + rank)
            data = batch(generator)
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(data)
            targets = torch.randint(logits.shape[-1], logits.shape[:-1], generator=generator)
            torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten()).backward()
            found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        optimizer.step()
    return found


def _repeated(flat: Any) -> Any:
    whole = flat.numel() // 32 * 32
    return flat[:whole].repeat(-(-VALUES // whole))[:VALUES].contiguous()


def _time_kind(kind: str, flat: Any, rounds: int) -> list[dict[str, Any]]:
    import torch

    from ddp_hooks import _C
    from ddp_hooks_testing import _C as testing

    buffer = torch.empty(_C.most_coded_bytes(flat.numel(), flat), dtype=torch.uint8)
    result, other = torch.empty_like(flat), torch.empty_like(flat)
    size = testing.encode(flat, buffer)
    coded = buffer[:size].clone()
    testing.decode(coded, result)
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    correct = torch.equal(result.view(word), flat.view(word))
    sums = torch.zeros_like(flat)
    calls: dict[str, Call] = {
        "encode": lambda: testing.encode(flat, buffer),
        "decode": lambda: testing.decode(coded, result),
        "decode and add": lambda: testing.decode(coded, sums, True),
        "copy": lambda: other.copy_(flat),
    }
    samples: dict[str, list[float]] = {operation: [] for operation in calls}
    for turn in range(rounds + 1):
        for operation, call in calls.items():
            start = time.perf_counter()
            call()
            if turn > 0:  # the first one touches memory for the first time
                samples[operation].append(time.perf_counter() - start)
    value_bytes = flat.numel() * flat.element_size()
    return [
        {
            "part": "coding",
            "operation": operation,
            "gradients": kind,
            "bits_per_value": 8 * size / flat.numel(),
            "bits_of_a_value": 8 * flat.element_size(),
            "gigabytes_per_second": value_bytes / harness.quartiles(samples[operation])["median"] / 1e9,
            "seconds": harness.quartiles(samples[operation]),
            "baseline": "copy_ of the values",
            "baseline_seconds": harness.quartiles(samples["copy"]),
            "time_over_copy": harness.quartiles(
                [a / b for a, b in zip(samples[operation], samples["copy"], strict=True)]
            ),
            "rounds": rounds,
            "correct": correct,
        }
        for operation in calls
        if operation != "copy"
    ]


def describe_coding(rows: Sequence[dict[str, Any]]) -> str:
    """Return the sentence that says what the rows show."""

    def kind(name: str) -> str:
        found = [row for row in rows if row["gradients"] == name]
        times = ", ".join(f"{row['time_over_copy']['median']:.2f}" for row in found)
        return f"{name}: {found[0]['bits_per_value']:.1f} of {found[0]['bits_of_a_value']} bits ({times})"

    names = list(dict.fromkeys(row["gradients"] for row in rows))
    wrong = sum(not row["correct"] for row in rows)
    return (
        "Bits per value, and the times of encode, decode, and decode and add, over that of a copy. "
        f"{'; '.join(map(kind, names))}. "
        f"{f'{wrong} of {len(rows)} rows gave a wrong result.' if wrong else 'All results were right.'}"
    )
