"""Accelerate needs no integration: `register` takes what `prepare` returns, and Accelerate saves the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedDataParallelKwargs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader
from torch.utils.tensorboard.writer import SummaryWriter
from trainers import (
    STEPS,
    Items,
    Training,
    assert_trained_alike,
    make_model,
    make_optimizer,
    on_launched,
    run_launched,
    sent,
    weights_of,
)

import ddp_hooks


def make_accelerator(**options: Any) -> Accelerator:
    # They outlive the process group of the test before.
    for kept in (AcceleratorState, GradientState, PartialState):
        kept._reset_state()
    handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    return Accelerator(cpu=True, kwargs_handlers=[handler], **options)


def train(accelerator: Accelerator, way: str = "register") -> tuple[Training, ddp_hooks.SkipUnusedState | None, Any]:
    model = make_model()
    ddp, optimizer, loader = accelerator.prepare(model, make_optimizer(model), DataLoader(Items(), batch_size=1))
    ways = {"register": lambda: ddp_hooks.register(ddp, "skip_unused"), "enable": lambda: ddp_hooks.states()[-1]}
    state = ways.get(way, lambda: None)()
    for batch in loader:
        with accelerator.accumulate(ddp):
            accelerator.backward(ddp(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    # The state works as long as there is its module.
    return Training(weights_of(model), None if state is None else state.stats()), state, ddp


@on_launched
def test_trains_as_plain_ddp(rank: int, tmp_path: Path) -> None:
    assert_trained_alike(rank, train(make_accelerator())[0])
    with ddp_hooks.enable("skip_unused"):
        ours = train(make_accelerator(), "enable")[0]
    assert_trained_alike(rank, ours)
    assert_trained_alike(rank, train(make_accelerator(dynamo_backend="eager"))[0])

    accumulated = [train(make_accelerator(gradient_accumulation_steps=2), way)[0] for way in ("register", "plain DDP")]
    assert accumulated[0].statistics.steps == STEPS // 2
    for ours, plain in zip(accumulated[0].weights, accumulated[1].weights, strict=True):
        assert torch.equal(ours, plain)


# --- checkpoints


def save(accelerator: Accelerator, state: ddp_hooks.SkipUnusedState | None, folder: Path) -> None:
    """Save as docs/trainers.md does."""
    accelerator.save_state(str(folder))
    if state is not None:
        accelerator.save(state.state_dict(), str(folder / "ddp_hooks.pt"))
    accelerator.wait_for_everyone()


def load(accelerator: Accelerator, state: ddp_hooks.SkipUnusedState | None, folder: Path) -> None:
    accelerator.load_state(str(folder))
    if state is not None and (folder / "ddp_hooks.pt").exists():
        state.load_state_dict(torch.load(folder / "ddp_hooks.pt"))


def checkpoints_survive_the_hook(rank: int, folder: Path) -> None:
    weights, counted = {}, None
    for way in ("register", "plain DDP"):
        accelerator = make_accelerator()
        training, state, _ddp = train(accelerator, way)
        save(accelerator, state, folder / way)
        counted = training.statistics or counted
        weights[way] = training.weights
    for way in ("register", "plain DDP"):
        accelerator = make_accelerator()
        _, state, ddp = train(accelerator, way)
        for there in ("plain DDP", "register"):
            with torch.no_grad():
                for parameter in ddp.parameters():
                    parameter.add_(1)
            if state is not None:
                state.reset_stats()
            load(accelerator, state, folder / there)
            assert all(torch.equal(a, b) for a, b in zip(weights_of(ddp), weights[there], strict=True))
            if way == there == "register":
                assert sent(state.stats()) == sent(counted)


def test_checkpoints_survive_the_hook(tmp_path: Path) -> None:
    run_launched(checkpoints_survive_the_hook, tmp_path)
    # On one process as well, which does not wrap the model.
    for way in ("register", "plain DDP"):
        accelerator = make_accelerator()
        model = make_model()
        accelerator.prepare(model, make_optimizer(model))
        load(accelerator, None, tmp_path / way)


@on_launched
def test_logs_to_tensorboard(rank: int, tmp_path: Path) -> None:
    accelerator = make_accelerator(log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    _, state, _ = train(accelerator)
    accelerator.log(state.stats().to_metrics(), step=STEPS)
    # What `end_training` does, which also takes the process group away.
    for tracker in accelerator.trackers:
        tracker.finish()
    if rank == 0:
        written = {name: value for (name, step), value in read_scalars(tmp_path / "run").items() if step == STEPS}
        assert written == pytest.approx(state.stats().to_metrics(), rel=1e-6)


def read_scalars(folder: Path) -> dict[tuple[str, int], float]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {(tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}


def test_tensorboard_writer_takes_the_dictionary(tmp_path: Path) -> None:
    statistics = ddp_hooks.statistics.Statistics(
        steps=4, dense_bytes=4000, payload_bytes=900, mask_bytes=100, messages=8
    )
    with SummaryWriter(tmp_path) as writer:
        for name, value in statistics.to_metrics().items():
            writer.add_scalar(name, value, global_step=4)
    scalars = read_scalars(tmp_path)
    assert scalars["ddp_hooks/saved_fraction", 4] == 0.75
    assert scalars["ddp_hooks/payload_bytes_per_step", 4] == 225
    assert len(scalars) == len(statistics.to_metrics())
