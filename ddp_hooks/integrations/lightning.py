"""A callback for Lightning, which registers the hook on the wrapped module, and logs what it saves."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ..hooks import SkipUnusedState
from ..policies import Policy
from ..serving.modules import uncompiled
from .hook_of_trainer import HookOfTrainer, Log

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
except ModuleNotFoundError:  # the same, under the name that it had first
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]
    from pytorch_lightning.strategies import ModelParallelStrategy  # type: ignore[assignment]


class SkipUnusedCallback(Callback):
    """Registers the hook on the module that each ``trainer.fit`` trains.

    Do not change the strategy: ``"ddp"``, ``"ddp_find_unused_parameters_true"``, or a ``DDPStrategy``. On a single
    device without a strategy, the callback does nothing.

    Args:
        policy: as for :func:`ddp_hooks.register`.
        log: log three numbers about the steps since the last time whenever the trainer logs (``log_every_n_steps``):
            ``ddp_hooks/saved_fraction`` and two others, see :meth:`ddp_hooks.statistics.Statistics.to_metrics`.
            ``"everything"`` logs all counters.
        settings: fields of the policy to set differently, as for :func:`ddp_hooks.register`.

    Raises:
        TypeError, ValueError, RuntimeError: from ``trainer.fit``, as for :func:`ddp_hooks.register`.

    Example::

        trainer = Trainer(strategy="ddp", devices=2, callbacks=[SkipUnusedCallback()])
    """

    def __init__(self, policy: Policy | str = "auto", *, log: Log = True, **settings: Any) -> None:
        self._hook = HookOfTrainer(policy, settings, log)

    @property
    def state(self) -> SkipUnusedState | None:
        """The hook's state, for statistics and usage; None before the first ``trainer.fit`` has wrapped the module."""
        return self._hook.state

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register here, because `setup` runs before the module is wrapped."""
        module = trainer.strategy.model
        ddp = uncompiled(module)
        if isinstance(ddp, DistributedDataParallel):
            self._hook.register(ddp)
        elif trainer.world_size > 1:
            way_out = 'use strategy="ddp", or remove the callback'
            if isinstance(trainer.strategy, ModelParallelStrategy):
                way_out = (
                    "remove the callback, and in LightningModule.on_fit_start call ddp_hooks.fsdp.register on the "
                    "module that configure_model applied fully_shard to"
                )
            raise TypeError(
                "SkipUnusedCallback: expected a strategy that wraps the module in DistributedDataParallel, received "
                f"{type(trainer.strategy).__name__}; {way_out}"
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was saved since the last time, if Lightning is about to write a row."""
        # As Lightning's own monitors do. Logging costs more than the hook, so not in every step.
        if self._hook.log and trainer._logger_connector.should_update_logs:
            metrics = self._hook.take_metrics()
            pl_module.log_dict(metrics, on_step=True, on_epoch=False, batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        """Return policy and statistics, for the trainer's checkpoint."""
        return self._hook.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the statistics of a checkpoint (``ckpt_path``)."""
        self._hook.load_state_dict(state_dict)
