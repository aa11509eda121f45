"""Trainers on the pretended device: the weights of the CPU. Lightning also freezes and rebuilds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_integrations_accelerate as with_accelerate
import test_integrations_transformers as with_transformers
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import DDPStrategy
from spawn import on_ranks, run_ranks
from test_integrations_lightning import Lightning, loader, make_trainer
from test_pretend import BACKEND
from test_pretend import pytestmark as pytestmark
from torch import Tensor
from trainers import Training, environment, weights_of

import ddp_hooks
from ddp_hooks.integrations.lightning import SkipUnusedCallback


class PretendedAccelerator(Accelerator):
    """What Lightning asks of a device."""

    def setup_device(self, device: torch.device) -> None:
        """There is only one."""

    def teardown(self) -> None:
        """Nothing was set up."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("pretend", 0)] * int(devices)

    @staticmethod
    def auto_device_count() -> int:
        return 2

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "pretend"


class PretendedStrategy(DDPStrategy):
    """Lightning wraps on a stream of CUDA if DDP is told a device."""

    def determine_ddp_device_ids(self) -> None:
        """DDP finds it out."""


class Freezing(Lightning):
    """Freezes after a step, and makes the Reducer anew later."""

    def on_fit_start(self) -> None:
        self.schedule = ddp_hooks.FreezeSchedule(self.model, {1: "backbone"}, {4: "backbone"})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.schedule.step()
        if batch_idx == 3:
            ddp_hooks.rebuild(self.trainer.strategy.model)


def fit(rank: int, device: str) -> tuple[list[Tensor], Any]:
    strategy = DDPStrategy(find_unused_parameters=True)
    options: dict[str, Any] = {}
    if device == "pretend":
        strategy = PretendedStrategy(find_unused_parameters=True)
        options = {"accelerator": PretendedAccelerator()}
    callback = SkipUnusedCallback("skip_unused")
    module = Freezing()
    make_trainer(callback, strategy=strategy, **options).fit(module, loader())
    assert next(module.parameters()).device.type == "cpu"  # moved back by Lightning
    assert callback.state is not None
    return [parameter.detach().clone() for parameter in module.parameters()], callback.state.stats()


def both_environments(rank: int) -> dict[str, str]:
    return {**environment(rank), "DDP_HOOKS_IMPORT_FIRST": "pretend"}


@on_ranks(2, backend=BACKEND, environment=both_environments)
def test_lightning(rank: int) -> None:
    expected, statistics = fit(rank, "cpu")
    found, ours = fit(rank, "pretend")
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert (ours.steps, ours.payload_bytes) == (statistics.steps, statistics.payload_bytes)
    assert ours.saved_fraction > 0.2


@contextlib.contextmanager
def accelerate_on(device: str) -> Iterator[None]:
    """Accelerate, and with it transformers' Trainer, takes this device for what it launches as on CPUs."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = device
    # Parameters that are moved to such a device would be new ones otherwise, which their optimizer does not know.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
        del os.environ["ACCELERATE_TORCH_DEVICE"]


def train_with_accelerate(folder: Path) -> Training:
    return with_accelerate.train(with_accelerate.make_accelerator())[0]


def train_with_transformers(folder: Path) -> Training:
    trainer = with_transformers.make_trainer(folder)
    callback = with_transformers.add_callback(trainer, "skip_unused")
    trainer.train()
    return Training(weights_of(trainer.model), callback.state.stats())


def both_train_alike(rank: int, train: Callable[[Path], Training], folder: Path) -> None:
    found = {}
    for device in ("cpu", "pretend"):
        with accelerate_on(device):
            found[device] = train(folder)
        assert all(weight.device.type == device for weight in found[device].weights)
    for ours, expected in zip(found["pretend"].weights, found["cpu"].weights, strict=True):
        assert torch.equal(ours.cpu(), expected)
    counted = [training.statistics for training in found.values()]
    assert counted[0].payload_bytes == counted[1].payload_bytes > 0
    assert counted[0].steps == counted[1].steps > 0


@pytest.mark.parametrize("train", [train_with_accelerate, train_with_transformers])
def test_accelerate(train: Callable[[Path], Training], tmp_path: Path) -> None:
    run_ranks(2, both_train_alike, train, tmp_path, backend=BACKEND, environment=both_environments)
