"""A callback for transformers' Trainer, which registers the hook on the wrapped module, and logs what it saves."""

from __future__ import annotations

import weakref
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..hooks import SkipUnusedState
from ..policies import Policy
from ..serving.modules import uncompiled
from ..wording import short
from .hook_of_trainer import HookOfTrainer, Log

# What the statistics are called in a checkpoint's `trainer_state.json`.
_SAVED_AS = "ddp_hooks"


class SkipUnusedCallback(TrainerCallback):
    """Registers the hook on the module that each ``trainer.train()`` trains.

    The statistics continue from one ``train()`` to the next, and after ``resume_from_checkpoint``.

    Args:
        trainer: the trainer that you add the callback to. Trainer passes only the model to its callbacks, and only the
            trainer knows the module that wraps the model.
        policy: as for :func:`ddp_hooks.register`.
        log: add three numbers about the steps since the last time to Trainer's logs whenever it logs a loss
            (``logging_steps``): ``ddp_hooks/saved_fraction`` and two others, see
            :meth:`ddp_hooks.statistics.Statistics.to_metrics`. ``"everything"`` adds all counters.
        settings: fields of the policy to set differently, as for :func:`ddp_hooks.register`.

    Raises:
        TypeError: immediately, if ``trainer`` is not a Trainer.
        TypeError, ValueError, RuntimeError: from ``trainer.train()``, as for :func:`ddp_hooks.register`.

    Example::

        trainer = Trainer(model, arguments, train_dataset=dataset)
        trainer.add_callback(SkipUnusedCallback(trainer))
        trainer.train()
    """

    def __init__(self, trainer: Trainer, policy: Policy | str = "auto", *, log: Log = True, **settings: Any) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"SkipUnusedCallback: expected the Trainer that it is added to, received {short(trainer)}; call "
                "trainer.add_callback(SkipUnusedCallback(trainer))"
            )
        # Weakly, because the trainer holds its callbacks.
        self._trainer = weakref.ref(trainer)
        self._hook = HookOfTrainer(policy, settings, log)

    @property
    def state(self) -> SkipUnusedState | None:
        """The hook's state, for statistics and usage; None before the first ``trainer.train()``."""
        return self._hook.state

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Register the hook, and continue the statistics of the checkpoint.

        A second ``train()`` finds the wrapper of the first one, which already has its hook.
        """
        trainer = self._trainer()
        if trainer is None:
            return
        module = trainer.model_wrapped
        ddp = uncompiled(module)
        if isinstance(ddp, DistributedDataParallel):
            # Only what was read from a checkpoint has it now.
            saved = _saved_in(state).get(_SAVED_AS, {})
            if saved:
                self._hook.load_state_dict(saved)
            self._hook.register(ddp)
        elif args.world_size > 1:
            raise TypeError(
                "SkipUnusedCallback: expected a model that Trainer wraps in DistributedDataParallel, received "
                f"{short(module)}; train without FSDP or DeepSpeed, or remove the callback"
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Put the statistics where Trainer finds them if it saves a checkpoint.

        Other callbacks and an evaluation decide later whether it saves one.
        """
        if state.is_world_process_zero and self._hook.state is not None:
            _saved_in(state)[_SAVED_AS] = self._hook.state_dict()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **others: Any,
    ) -> None:
        """Log with each loss what was saved since the last time."""
        trainer = self._trainer()
        # Without a loss it is what was logged below, an evaluation, or the summary at the end.
        if trainer is None or "loss" not in (logs or {}):
            return
        metrics = self._hook.take_metrics()
        if metrics:
            trainer.log(metrics)


def _saved_in(state: TrainerState) -> dict[str, Any]:
    # What is declared as a list of callbacks is a dictionary of what they save once the state is made.
    saved: Any = state.stateful_callbacks
    return saved if isinstance(saved, dict) else {}
