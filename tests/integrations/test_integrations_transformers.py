"""The callback in transformers' Trainer itself: as plain DDP, train after train, with what it saved in the logs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from commands import run_captured
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import SequentialSampler
from torch.utils.tensorboard.writer import SummaryWriter  # noqa: F401 - what report_to="tensorboard" needs
from trainers import (
    STEPS,
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
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import ddp_hooks
from ddp_hooks.integrations.transformers import SkipUnusedCallback

ROOMS = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tools")]


class SequentialTrainer(Trainer):
    def _get_train_sampler(self, *args: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def make_trainer(folder: Path, **options: Any) -> Trainer:
    # They outlive the process group of the test before.
    for kept in (AcceleratorState, GradientState, PartialState):
        kept._reset_state()
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 1,
        "max_grad_norm": 0.0,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    model = make_model()
    optimizer = make_optimizer(model)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    arguments = TrainingArguments(**{**defaults, **options})
    trainer = SequentialTrainer(model, arguments, train_dataset=Items(), optimizers=(optimizer, constant))
    trainer.remove_callback(PrinterCallback)
    return trainer


def add_callback(trainer: Trainer, *args: Any, **options: Any) -> SkipUnusedCallback:
    callback = SkipUnusedCallback(trainer, *args, **options)
    trainer.add_callback(callback)
    return callback


@on_launched
def test_trains_as_plain_ddp(rank: int, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    callback = add_callback(trainer, "skip_unused")
    trainer.train()
    assert_trained_alike(rank, Training(weights_of(trainer.model), callback.state.stats()))

    # Each loss is followed by what the steps since the last one have sent.
    payload = "ddp_hooks/payload_bytes_per_step"
    logged = [entry for entry in trainer.state.log_history if payload in entry]
    assert [entry["step"] for entry in logged] == [
        entry["step"] for entry in trainer.state.log_history if "loss" in entry
    ]
    assert sum(entry[payload] for entry in logged) * 2 == callback.state.stats().payload_bytes

    # The wrapper of the first train() is there already, and so is its hook.
    first, before = callback.state, callback.state.stats()
    trainer.train()
    assert callback.state is first
    assert sent(first.stats() - before) == sent(before)
    assert not differ_between_ranks(weights_of(trainer.model))

    # Where it wraps anew, as after running out of memory (auto_find_batch_size), there is a new state.
    trainer.model_wrapped = trainer.model
    trainer.train()
    assert callback.state is not first
    assert callback.state.stats().steps == 3 * STEPS
    assert not differ_between_ranks(weights_of(trainer.model))


@on_launched
def test_enable_does_the_same(rank: int, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with ddp_hooks.enable("skip_unused") as enabled:
        trainer.train()
    (state,) = enabled.states
    assert_trained_alike(rank, Training(weights_of(trainer.model), state.stats()))


@on_launched
def test_resumes_from_a_checkpoint(rank: int, tmp_path: Path) -> None:
    half = STEPS // 2
    first = make_trainer(tmp_path, save_strategy="steps", save_steps=half)
    whole = add_callback(first, "skip_unused")
    first.train()
    second = make_trainer(tmp_path)
    callback = add_callback(second, "allreduce")
    second.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{half}"))
    assert all(torch.equal(a, b) for a, b in zip(weights_of(second.model), weights_of(first.model), strict=True))
    # The bytes of before go on; the policy is the one that the program asks for now.
    before = train_by_hand(rank, "skip_unused", half).statistics
    statistics = callback.state.stats()
    assert statistics.steps == STEPS
    assert statistics.dense_bytes == whole.state.stats().dense_bytes
    assert statistics.payload_bytes == before.payload_bytes + statistics.dense_bytes - before.dense_bytes
    # What is logged is of the steps of this run.
    payload = "ddp_hooks/payload_bytes_per_step"
    logged = [entry for entry in second.state.log_history if payload in entry and entry["step"] > half]
    assert logged[-1][payload] == (statistics.dense_bytes - before.dense_bytes) / (STEPS - half)
    # A new training begins anew, but for what the callback has counted.
    second.train()
    assert callback.state.stats().steps == 2 * STEPS


def checkpoints_survive_the_callback(rank: int, folder: Path) -> None:
    half = STEPS // 2
    weights = []
    for name in ("with", "without"):
        trainer = make_trainer(folder / name, save_strategy="steps", save_steps=half)
        if name == "with":
            add_callback(trainer, "skip_unused")
        trainer.train()
        weights = weights_of(trainer.model)
    for name in ("with", "without"):
        # Which also looks for the callbacks that the checkpoint names.
        trainer = make_trainer(folder / "second", restore_callback_states_from_checkpoint=True)
        callback = None if name == "with" else add_callback(trainer, "skip_unused")
        trainer.train(resume_from_checkpoint=str(folder / name / f"checkpoint-{half}"))
        assert all(torch.equal(a, b) for a, b in zip(weights_of(trainer.model), weights, strict=True))
        assert callback is None or callback.state.stats().steps == STEPS - half


def test_checkpoints_survive_the_callback(tmp_path: Path) -> None:
    run_launched(checkpoints_survive_the_callback, tmp_path)
    # On one process, too, with the callback and without.
    for name in ("with", "without"):
        for with_callback in (False, True):
            trainer = make_trainer(tmp_path / "alone", restore_callback_states_from_checkpoint=True)
            if with_callback:
                add_callback(trainer)
            trainer.train(resume_from_checkpoint=str(tmp_path / name / f"checkpoint-{STEPS // 2}"))


TRAINING = """
import sys
from pathlib import Path

import torch
from test_integrations_transformers import make_trainer

trainer = make_trainer(Path(sys.argv[1]))
trainer.train()
if trainer.is_world_process_zero():
    torch.save(list(trainer.model.parameters()), Path(sys.argv[1]) / "weights.pt")
"""


@pytest.mark.thorough
def test_a_run_needs_no_line(tmp_path: Path) -> None:
    """Started with ``python -m ddp_hooks run`` in a process group of its own, a script trains and sends the same."""
    (tmp_path / "script.py").write_text(TRAINING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "ddp_hooks", "run", "--policy", "skip_unused", "--report", str(tmp_path / "report.json")]
    done = run_captured(
        [*command, str(tmp_path / "script.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*ROOMS, *filter(None, [os.environ.get("PYTHONPATH")])])},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    statistics = json.loads((tmp_path / "report.json").read_text())["total"]
    by_hand = [run_launched(train_by_hand, policy)[0] for policy in (None, "skip_unused")]
    for name in ("steps", "dense_bytes", "payload_bytes", "mask_bytes"):
        assert statistics[name] == getattr(by_hand[1].statistics, name)
    for ours, plain in zip(torch.load(tmp_path / "weights.pt"), by_hand[0].weights, strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.thorough
@on_launched
def test_trains_compiled(rank: int, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, torch_compile=True, torch_compile_backend="eager", logging_steps=STEPS)
    callback = add_callback(trainer, "skip_unused")
    trainer.train()
    assert_trained_alike(rank, Training(weights_of(trainer.model), callback.state.stats()))


@on_launched
def test_logs_to_tensorboard(rank: int, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, report_to="tensorboard", logging_steps=3)
    callback = add_callback(trainer, "skip_unused")
    trainer.train()
    if rank == 0:
        (folder_of_events,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
        events = EventAccumulator(str(folder_of_events))
        events.Reload()
        tag = next(tag for tag in events.Tags()["scalars"] if tag.endswith("ddp_hooks/payload_bytes_per_step"))
        assert [event.step for event in events.Scalars(tag)] == [3, 6]
        assert sum(event.value for event in events.Scalars(tag)) * 3 == callback.state.stats().payload_bytes


@on_launched
def test_takes_settings(rank: int, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    callback = add_callback(trainer, "skip_unused", rebuild_after=10, direct=False)
    trainer.train()
    assert callback.state.policy == ddp_hooks.Policy(
        "skip_unused", rebuild_after=10, tuning=ddp_hooks.Tuning(direct=False)
    )
    trainer = make_trainer(tmp_path)
    add_callback(trainer, **({"rebuild": 10} if rank == 0 else {}))
    with pytest.raises((TypeError, RuntimeError), match=r"expected fields of ddp_hooks\.Policy .* received 'rebuild'"):
        trainer.train()


@on_launched
def test_says_what_is_wrong(rank: int, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"expected the Trainer that it is added to, .*SkipUnusedCallback\(trainer\)"):
        SkipUnusedCallback("auto")
    trainer = make_trainer(tmp_path)
    add_callback(trainer, "everything" if rank == 0 else "auto")
    with pytest.raises((ValueError, RuntimeError), match="expected one of allreduce"):
        trainer.train()
