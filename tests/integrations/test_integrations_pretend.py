"""Lightning's callback, with a FreezeSchedule and a rebuild, on the pretended device: the weights of the CPU."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import DDPStrategy
from spawn import run_ranks
from test_integrations_lightning import Lightning, loader, make_trainer
from test_pretend import BACKEND
from test_pretend import pytestmark as pytestmark
from torch import Tensor
from trainers import environment

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


def trains_alike(rank: int) -> None:
    expected, statistics = fit(rank, "cpu")
    found, ours = fit(rank, "pretend")
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert (ours.steps, ours.payload_bytes) == (statistics.steps, statistics.payload_bytes)
    assert ours.saved_fraction > 0.2


def both_environments(rank: int) -> dict[str, str]:
    return {**environment(rank), "DDP_HOOKS_IMPORT_FIRST": "pretend"}


def test_lightning() -> None:
    run_ranks(2, trains_alike, backend=BACKEND, environment=both_environments)
