"""Situations that people ask about: what the report has to say of each, and what it must not say."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
from quick import thorough
from spawn import run_ranks
from test_doctor_page import doctors_part, run

from ddp_hooks.cli import doctor as command

SCRIPT = "tests/doctored/kinds.py"
ROOT = Path(__file__).parents[2]

HEALTHY = (
    "plain",
    "accumulated",
    "evaluated_past_ddp",
    "adversarial",
    "joined",
    "checkpointed",
    "penalised",
    "in_two_parts",
    "loss_with_wrapped_weights",
)
# By kind, what the report says and what it does not, wherever lines end. What breaks on every rank alike.
REPORTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "accumulated_and_sent": (
        ("Nothing is wrong.", "have to be sent? No: 8 of 12 only added", "DDP sends 67% less"),
        ("replicas",),
    ),
    "one_step": (("In its first step, backward left out right,", "find_unused_parameters=True"), ()),
    "unused_after_accumulating": (
        ("In its first step, backward left out right,",),
        ("averages nothing", "no_sync"),
    ),
    "swallowed": (("In its first step, backward left out right,",), ("Nothing is wrong",)),
    "exited": (("In its first step, backward left out right,", "sys.exit(1)"), ()),
    "other_words": (
        ("After 3 finished steps, backward left out right", "Wrap with find_unused_parameters=True"),
        ("In its first step",),
    ),
    "left_out": (
        ("The loss leaves out what right computes", "needed? Yes", "legal? No: the loss leaves out an output"),
        ("all zero", "leave it out", "got one in some step"),
    ),
    "frozen_without_the_flag": (
        ("left was frozen after wrapping, and DDP waits for its gradients after 3 finished steps", "rebuild"),
        ("ranks use different",),
    ),
    "frozen_halfway": (
        ("left is frozen since step 4", "rebuild", "freeze(ddp", "Either saves 25.0% of the bytes"),
        ("used in some steps",),
    ),
    "static_and_less": (("static_graph=True is set, but the graph changed", "Wrap without static_graph=True"), ()),
    "static_and_more": (("static_graph=True is set, but the graph changed", "Wrap without static_graph=True"), ()),
    "static_and_left_out": (("static_graph=True is set, but the graph changed", "Wrap without static_graph"), ()),
    "caught": (
        ("A backward pass raised on ranks 0, 1 after 3 finished steps, and the script caught the error",),
        ("find_unused_parameters=True", "freeze"),
    ),
    "raised_in_the_loss": (
        ("an error in backward on ranks 0, 1, after 3 finished steps: RuntimeError",),
        ("DDP waits",),
    ),
    "raised_at_its_end": (
        ("6 steps on 2 ranks", "ended with an error on ranks 0, 1, after 6 finished steps: ValueError: no such folder"),
        ("nobody to send to", "on 1 rank", "saved 0 bytes"),
    ),
    "reentrant_with_the_flag": (
        ("checkpoints with use_reentrant=True", "Pass use_reentrant=False", "static_graph=True"),
        ("Wrap with find_unused_parameters=True", "2 backward passes"),
    ),
    "two_losses": (("2 backward passes of one step went through it", "Add the losses up"), ("use_reentrant",)),
    "part_past_forward": (("the loss uses it past DDP's forward pass",), ("use_reentrant", "2 backward passes")),
    "parameter_in_the_loss": (("the loss uses it past DDP's forward pass",), ("use_reentrant",)),
    "two_forward_passes": (("there were 2 forward passes before it",), ("use_reentrant", "past DDP's")),
    "opaque_output": (("DDP found nothing in what forward returned",), ("use_reentrant", "past DDP's")),
    "inner_module": (
        ("DDP averages nothing: for 6 backward passes", "ddp.module(...)", "the replicas differ in 6 of 6"),
        ("Nothing can be said", "got one in some step"),
    ),
    "inner_module_now_and_then": (
        ("DDP does not average all gradients: for 3 backward passes", "ddp.module(...)", "the replicas differ"),
        ("Nothing is wrong",),
    ),
    "part_of_the_module": (("DDP averages nothing", "ddp.module.part(...)", "the replicas differ"), ()),
    "second_backward": (
        ("DDP does not average the gradients of 6 backward passes", "the replicas differ", "Add the losses up"),
        ("Nothing is wrong", "ddp.module"),
    ),
    "second_backward_with_the_flag": (("DDP does not average the gradients of", "Add the losses up"), ()),
    "never_synchronised": (("every backward pass ran under no_sync()", "the replicas differ"), ("ddp.module",)),
    "rest_not_synchronised": (("the passes before 3 steps", "ran under no_sync()", "the replicas differ"), ()),
    "stepped_in_hooks": (("before DDP has averaged their gradients", "the replicas differ"), ()),
    "gradients_by_hand": (
        ("its forward pass ran 6 times, and no backward() followed", "the replicas differ", "Call loss.backward()"),
        ("Nothing can be said",),
    ),
    "cast_afterwards": (
        (
            "cast or moved after wrapping (from float32 to float64)",
            "the replicas differ",
            "Cast and move the model before",
        ),
        ("Nothing can be said",),
    ),
    "cast_in_part": (
        ("right was cast or moved after wrapping (from float32 to float64)", "DDP waits for its gradients"),
        ("find_unused_parameters", "left out"),
    ),
    "forward_under_no_sync": (
        ("the forward pass before every backward pass ran under no_sync()", "the replicas differ"),
        ("ddp.module",),
    ),
    "inner_module_for_long": (("for 48 backward passes", "Stopped your script after 48 steps"), ("came to its end",)),
    "all_replaced": (
        ("The whole model was replaced after wrapping", "Stopped your script after 48 steps"),
        ("came to its end",),
    ),
    "loss_with_weights": (
        (
            "An optimizer steps Margins.weight, which is in no DistributedDataParallel module",
            "part of the wrapped model",
        ),
        ("Nothing is wrong", "Add after wrapping"),
    ),
    "wrapped_twice": (
        ("contains other DistributedDataParallel modules (left)", "sent twice", "Wrap the whole model once"),
        ("Add after wrapping",),
    ),
    "severed_checkpoint": (
        ("backward left out trunk", "compute no gradients if none of their inputs requires one", "use_reentrant=False"),
        ("wrap with find_unused_parameters",),
    ),
    "severed_checkpoint_with_the_flag": (
        ("No parameter of trunk got a gradient", "if none of their inputs requires one", "use_reentrant=False"),
        ("Use it in the loss",),
    ),
    "forgotten_in_backward": (
        (
            "Backward reaches scale and computes no gradient for it: a custom autograd function returns None",
            "needed? No:",
            "legal? As far as seen",
        ),
        ("Nothing is wrong", "leaves out an output"),
    ),
    "forgotten_in_backward_with_the_flag": (
        ("Backward reaches scale and computes no gradient for it", "returns None", "or the loss leaves out an output"),
        ("Nothing is wrong",),
    ),
    "reset_while_accumulating": (
        ("A backward pass raised on ranks 0, 1 after 0 finished steps", "Call zero_grad() only after"),
        ("DDP waits",),
    ),
    "loss_of_gradients": (
        ("backward left out 2.bias", "Let the loss depend on it", "or a loss of gradients only"),
        ("it was cut short", "Wrap with find_unused"),
    ),
    "weights_of_one_rank": (("The replicas differ in 6 of 6 parameters", "Load weights before wrapping"), ()),
    "step_left_out": (
        ("The replicas differ in 6 of 6 parameters", "first seen after 4 finished steps", "a step of the optimizer"),
        ("Load weights before",),
    ),
}
# What other ranks only wait for ends the process.
ON_ONE_RANK: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "one_batch_less": (
        ("rank 0 waits in the step after 5 finished steps for rank 1, which has come to the end", "ddp.join()"),
        ("find_unused_parameters", "no word"),
    ),
    "bad_batch": (
        ("ran different numbers of backward passes", "on rank 1 no backward pass followed some forward pass"),
        ("find_unused_parameters",),
    ),
    "raised_on_one": (
        ("3 steps on 2 ranks", "Rank 1 ended with an error (KeyError: 'label') while rank 0 waited"),
        ("find_unused_parameters", "before its first step"),
    ),
    "unused_on_one": (("backward left out right on rank 1", "Wrap with find_unused_parameters=True"), ("no word",)),
    "raised_early_on_one": (
        ("on rank 1 backward raised RuntimeError: out of memory, it says, and the script caught it",),
        ("no backward pass followed", "find_unused_parameters"),
    ),
    "barrier_on_one": (
        ("Rank 1 waits in the step after 4 finished steps for rank 0, which waits in barrier (", "kinds.py:"),
        ("number of batches", "Nothing is wrong"),
    ),
    "all_reduce_within_forward": (
        (
            "rank 0 waits in all_reduce there",
            "Call all_reduce on every rank or on none",
            "in backward after 3 finished",
        ),
        ("Nothing is wrong", "left no word"),
    ),
    "evaluated_on_one": (
        ("No step has ended for a long time: rank 0 waits in", "rank 1 waits in barrier (", "kinds.py:"),
        ("Nothing is wrong",),
    ),
    "stuck_on_one": (
        ("Rank 0 waits in the step after 3 finished steps for rank 1, which is not in a step (", "in step)"),
        ("number of batches", "Nothing is wrong"),
    ),
    "killed_on_one": (
        ("Rank 1 left no word while rank 0 waited for it after 3 finished steps", "-9 often means"),
        ("Mend what raised", "Nothing is wrong"),
    ),
    "raised_while_the_other_had_ended": (
        ("The script ended with an error on rank 1, after 6 finished steps: OSError: disk full",),
        ("no word", "on 1 rank"),
    ),
}


def run_kinds(rank: int, script: str, kinds: list[str]) -> dict[str, str]:
    texts = {}
    for kind in kinds:
        printed = io.StringIO()
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            contextlib.suppress(RuntimeError, ValueError, SystemExit),
        ):
            command.run(command.Options((script, kind), patience_seconds=20))
        texts[kind] = " ".join(printed.getvalue().split())
    return texts


def check(kind: str, text: str, said: tuple[str, ...], unsaid: tuple[str, ...]) -> None:
    assert [one for one in said if one not in text] == [], f"{kind}: {text}"
    assert [one for one in unsaid if one in text] == [], f"{kind}: {text}"


@pytest.mark.parametrize("part", [0, *thorough(1, 2)])
def test_what_is_wrong_is_said(part: int) -> None:
    kinds = [*HEALTHY, *REPORTS][part::3]
    outcomes = run_ranks(2, run_kinds, str(ROOT / SCRIPT), kinds, timeout=200)
    for kind in kinds:
        texts = [outcome[kind] for outcome in outcomes if "ddp_hooks doctor:" in outcome[kind]]
        assert len(texts) == 1, f"{kind}: not one rank has printed it"
        if kind in HEALTHY:
            check(kind, texts[0], ("Nothing is wrong.",), ("replicas", "DDP waits", "Also:", "have to be sent"))
        else:
            check(kind, texts[0], *REPORTS[kind])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ON_ONE_RANK)
def test_what_is_wrong_on_one_rank_is_said(kind: str) -> None:
    arguments = ["--nproc-per-node", "2", "-m", "ddp_hooks", "doctor", "--patience", "4", SCRIPT, kind]
    printed = run(arguments, 1)
    said, unsaid = ON_ONE_RANK[kind]
    check(kind, " ".join(doctors_part(printed).split()), said, ())
    check(kind, " ".join(printed.split()), (), unsaid)
