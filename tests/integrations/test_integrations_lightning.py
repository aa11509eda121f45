"""The callback in Lightning itself: as plain DDP, whatever Lightning does to the module before, between and after."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from trainers import (
    STEPS,
    Branching,
    Items,
    Training,
    assert_trained_alike,
    differ_between_ranks,
    make_model,
    make_optimizer,
    on_launched,
    run_launched,
    sent,
    train_by_hand,
    weights_of,
)

import ddp_hooks
from ddp_hooks.integrations.lightning import SkipUnusedCallback

SEARCHING = "ddp_find_unused_parameters_true"


class Lightning(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model)


def make_trainer(*callbacks: Callback, **options: Any) -> Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    defaults = {"accelerator": "cpu", "devices": 2, "strategy": SEARCHING, "max_epochs": 1, **quiet}
    # Its own sampler would shuffle.
    defaults["use_distributed_sampler"] = False
    return Trainer(callbacks=list(callbacks), **{**defaults, **options})


def loader(first_step: int = 0) -> DataLoader[Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return DataLoader(Items(STEPS), batch_size=1, sampler=range(2 * first_step + rank, 2 * STEPS, 2))


def fit(module: LightningModule, *callbacks: Callback, **options: Any) -> Training:
    make_trainer(*callbacks, **options).fit(module, loader())
    ours = [callback for callback in callbacks if isinstance(callback, SkipUnusedCallback)]
    return Training(weights_of(module), ours[0].state.stats() if ours else None)


# --- one line


@on_launched
def test_takes_settings(rank: int) -> None:
    callback = SkipUnusedCallback("skip_unused", rebuild_after=10, direct=False)
    fit(Lightning(), callback)
    assert callback.state.policy == ddp_hooks.Policy(
        "skip_unused", rebuild_after=10, tuning=ddp_hooks.Tuning(direct=False)
    )
    with pytest.raises((TypeError, RuntimeError), match=r"expected fields of ddp_hooks\.Policy .* received 'rebuild'"):
        fit(Lightning(), SkipUnusedCallback(**({"rebuild": 10} if rank == 0 else {})))


@on_launched
def test_trains_as_plain_ddp(rank: int) -> None:
    assert torch.equal(fit(Lightning()).weights[0], train_by_hand(rank, None).weights[0])
    assert_trained_alike(rank, fit(Lightning(), SkipUnusedCallback("skip_unused")))


class ManualLightning(Lightning):
    automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.model(**batch)["loss"])
        optimizer.step()


@on_launched
def test_trains_by_manual_optimization(rank: int) -> None:
    assert_trained_alike(rank, fit(ManualLightning(), SkipUnusedCallback("skip_unused")))


@on_launched
def test_enable_does_the_same(rank: int) -> None:
    callback = SkipUnusedCallback("skip_unused")
    with ddp_hooks.enable("skip_unused") as enabled:
        weights = fit(Lightning()).weights
        # Together: the callback takes the hook that is there.
        together = fit(Lightning(), callback)
    assert callback.state is enabled.states[1]
    assert_trained_alike(rank, Training(weights, enabled.states[0].stats()))
    assert_trained_alike(rank, together)


# --- one fit after the other


@on_launched
def test_goes_on_in_a_second_fit(rank: int) -> None:
    callback, module = SkipUnusedCallback("skip_unused"), Lightning()
    trainer = make_trainer(callback)
    trainer.fit(module, loader())
    first = callback.state
    assert_trained_alike(rank, Training(weights_of(module), first.stats()))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    assert callback.state is not first
    assert callback.state.stats().steps == 2 * STEPS
    again = sent(callback.state.stats() - first.stats())
    assert again == sent(first.stats())  # the same items, and so the same branches
    assert not differ_between_ranks(weights_of(module))


class Watch(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.model, DistributedDataParallel)
        self.ddp = weakref.ref(trainer.model)


@on_launched
def test_leaves_with_the_module(rank: int) -> None:
    watch, callback = Watch(), SkipUnusedCallback()
    fit(Lightning(), watch, callback)
    gc.collect()
    assert watch.ddp() is None
    assert callback.state.stats().steps == STEPS


@on_launched
def test_resumes_from_a_checkpoint(rank: int, tmp_path: Path) -> None:
    half = STEPS // 2
    first = make_trainer(SkipUnusedCallback("skip_unused"), limit_train_batches=half)
    first.fit(Lightning(), loader())
    path = str(tmp_path / "half.ckpt")
    first.save_checkpoint(path)

    module, callback = Lightning(), SkipUnusedCallback("allreduce")
    second = make_trainer(callback, max_epochs=2)
    second.fit(module, loader(half), ckpt_path=path)
    whole, before = train_by_hand(rank, "skip_unused"), train_by_hand(rank, "skip_unused", half)
    assert torch.equal(weights_of(module)[0], whole.weights[0])
    # The bytes of before go on; the policy is the one that the program asks for now.
    statistics = callback.state.stats()
    assert statistics.steps == STEPS
    assert statistics.dense_bytes == whole.statistics.dense_bytes
    dense_rest = whole.statistics.dense_bytes - before.statistics.dense_bytes
    assert statistics.payload_bytes == before.statistics.payload_bytes + dense_rest


def checkpoints_survive_the_callback(rank: int, folder: Path) -> None:
    half = STEPS // 2
    for name, callbacks in (("with", [SkipUnusedCallback("skip_unused")]), ("without", [])):
        trainer = make_trainer(*callbacks, limit_train_batches=half)
        trainer.fit(Lightning(), loader())
        trainer.save_checkpoint(str(folder / name))
    weights = train_by_hand(rank, None).weights
    for name, callbacks in (("with", []), ("without", [SkipUnusedCallback("skip_unused")])):
        module = Lightning()
        make_trainer(*callbacks, max_epochs=2).fit(module, loader(half), ckpt_path=str(folder / name))
        assert all(torch.equal(a, b) for a, b in zip(weights_of(module), weights, strict=True))
        assert all(callback.state.stats().steps == STEPS - half for callback in callbacks)


def test_checkpoints_survive_the_callback(tmp_path: Path) -> None:
    run_launched(checkpoints_survive_the_callback, tmp_path)
    # On one process, too, with the callback and without.
    for callbacks in ([], [SkipUnusedCallback()]):
        for name in ("with", "without"):
            trainer = make_trainer(*callbacks, devices=1, strategy="auto", max_epochs=2)
            trainer.fit(Lightning(), loader(), ckpt_path=str(tmp_path / name))


# --- freezing


class Backbone(LightningModule):
    """Needs both epochs: one with its backbone frozen, one without."""

    def __init__(self) -> None:
        super().__init__()
        model = make_model()
        self.backbone, self.rest = model.backbone, torch.nn.ModuleList([*model.branches, model.head])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        samples = torch.randn(4, self.backbone.in_features, generator=torch.Generator().manual_seed(int(batch["item"])))
        hidden = torch.relu(self.backbone(samples))
        for layer in self.rest[:-1]:
            hidden = torch.relu(layer(hidden))
        return self.rest[-1](hidden).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.rest.parameters(), lr=0.05, momentum=0.9)


class LateBackboneFinetuning(BackboneFinetuning):
    """Freezes once the module is wrapped, which plain DDP can do if it searches the graph in each step."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None: ...

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self.freeze_before_training(pl_module)


@on_launched
def test_finetunes_a_backbone(rank: int) -> None:
    unfreeze = {"unfreeze_backbone_at_epoch": 1, "lambda_func": lambda epoch: 1.5, "backbone_initial_lr": 0.02}
    wrong = fit(Backbone(), BackboneFinetuning(**unfreeze), strategy="ddp", max_epochs=2)
    assert differ_between_ranks(wrong.weights), "plain DDP averages the backbone now: say so in docs/trainers.md"

    right = fit(Backbone(), LateBackboneFinetuning(**unfreeze), max_epochs=2)
    assert not differ_between_ranks(right.weights)
    skip = ddp_hooks.policies.PRESETS["skip_unused"]
    for policy, first in ((skip, True), (skip, False), (dataclasses.replace(skip, rebuild_after=2), True)):
        callback, finetuning = SkipUnusedCallback(policy), BackboneFinetuning(**unfreeze)
        callbacks = (callback, finetuning) if first else (finetuning, callback)
        ours = fit(Backbone(), *callbacks, strategy="ddp", max_epochs=2)
        for a, b in zip(ours.weights, right.weights, strict=True):
            assert torch.equal(a, b)
        # Frozen, it costs nothing, and DDP does not even know it; unfrozen, it is sent.
        rest, whole = (sum(4 * weight.numel() for weight in weights) for weights in (ours.weights[2:], ours.weights))
        assert ours.statistics.payload_bytes == STEPS * (rest + whole)


# --- what is logged


@on_launched
def test_logs_what_is_saved(rank: int, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    callback = SkipUnusedCallback("skip_unused")
    trainer = make_trainer(callback, logger=logger, log_every_n_steps=2)
    trainer.fit(Lightning(), loader())
    statistics = callback.state.stats()
    payload = "ddp_hooks/payload_bytes_per_step"
    if rank == 0:
        text = (tmp_path / "metrics.csv").read_text().splitlines()
        assert len(text) == 1 + STEPS // 2, text
        column = text[0].split(",").index(payload)
        assert sum(float(row.split(",")[column]) for row in text[1:]) * 2 == statistics.payload_bytes
    assert 0 < trainer.callback_metrics["ddp_hooks/saved_fraction"] < 1
    silent = make_trainer(SkipUnusedCallback(log=False))
    silent.fit(Lightning(), loader())
    assert not silent.callback_metrics


# --- what has no DDP


class Unwrapped(DDPStrategy):
    def configure_ddp(self) -> None: ...


@on_launched
def test_refuses_another_strategy(rank: int) -> None:
    with pytest.raises(TypeError, match=r'expected a strategy that wraps .* received Unwrapped; use strategy="ddp"'):
        fit(Lightning(), SkipUnusedCallback(), strategy=Unwrapped())
    with pytest.raises((ValueError, RuntimeError), match="expected one of allreduce"):
        fit(Lightning(), SkipUnusedCallback("everything" if rank == 0 else "auto"))


class Sharded(Lightning):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(4, 1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(torch.ones(1, 4)).sum()

    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def on_fit_start(self) -> None:
        self.state = ddp_hooks.fsdp.register(self.model)


@on_launched
def test_shows_the_way_for_fsdp2(rank: int) -> None:
    def strategy() -> ModelParallelStrategy:
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)

    with pytest.raises(TypeError, match=r"ModelParallelStrategy; remove the callback, .*call ddp_hooks\.fsdp\.reg"):
        make_trainer(SkipUnusedCallback(), strategy=strategy()).fit(Sharded(), loader())
    module = Sharded()
    make_trainer(strategy=strategy()).fit(module, loader())
    assert module.state.stats().steps == STEPS


def test_alone_it_does_nothing() -> None:
    callback = SkipUnusedCallback()
    trainer = make_trainer(callback, devices=1, strategy="auto")
    trainer.fit(Lightning(), loader())
    assert callback.state is None
    assert callback.state_dict() == {}
    assert isinstance(trainer.lightning_module.model, Branching)
    with pytest.raises(TypeError, match="expected log to be True, False or 'everything', received 3"):
        SkipUnusedCallback(log=3)
