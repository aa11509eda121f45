"""A minute of the fuzzer, and proof that it finds what is wrong. An hour of it is `make fuzz`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fuzzer.campaign import Verdict, judge, run_many
from fuzzer.generate import HAS_CODED, generate
from fuzzer.odd import KINDS, odd_gradient
from fuzzer.program import Program
from fuzzer.shrink import shrink
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks

# Those that every run runs, and for how long it goes on with the ones that follow. Seconds.
FIXED = {2: 40, 3: 8}
MORE_SECONDS = 15.0


def assert_same(program: Program, verdict: Verdict) -> None:
    pytest.fail(
        f"{program}\n{verdict.kind}: {verdict.report}\n"
        f"make it small with: python tests/campaigns/fuzz.py --seed {program.seed} --ranks {program.ranks} "
        f"--device {program.options.device}"
    )


@pytest.mark.parametrize(
    ("ranks", "first", "end"),
    [
        (2, 0, FIXED[2] // 8),
        pytest.param(2, FIXED[2] // 8, FIXED[2], marks=pytest.mark.thorough),
        pytest.param(3, 0, FIXED[3], marks=pytest.mark.thorough),
    ],
)
def test_same_as_plain_ddp(ranks: int, first: int, end: int) -> None:
    tally = run_many((generate(seed, ranks) for seed in range(first, end)), on_failure=assert_same)
    assert (tally.programs, tally.bad) == (end - first, 0)


@pytest.mark.thorough
def test_more() -> None:
    until = time.monotonic() + MORE_SECONDS
    programs = (generate(seed, 2) for seed in range(FIXED[2], FIXED[2] + 1000))
    assert run_many(programs, until=until, on_failure=assert_same).bad == 0


@pytest.mark.thorough
def test_a_program_on_the_pretended_device_from_the_command_line() -> None:
    fuzz = Path(__file__).with_name("fuzz.py")
    command = [sys.executable, str(fuzz), "--seeds", "0:1", "--device", "pretend"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 programs, 0 differ" in done.stdout


def test_programs_are_data() -> None:
    """A seed makes the same program each time, and JSON keeps it."""
    for seed in range(200):
        program = generate(seed, 2)
        assert program == generate(seed, 2)
        assert Program.from_json(program.to_json()) == program
        assert str(program).count("\n") >= len(program.operations) + len(program.layers)
    assert len({generate(seed, 2).to_json() for seed in range(200)}) == 200


def test_everything_is_generated() -> None:
    """No operation, layer or option is lost from what programs are made of."""
    programs = [generate(seed, 2) for seed in range(1500)]
    done = {operation["do"] for program in programs for operation in program.operations}
    assert done == {
        *("pass", "fail", "update", "freeze", "unfreeze", "hook", "policy", "register", "rebuild"),
        *("broadcast", "average", "verify", "checkpoint", "evaluate"),
    }
    kinds = {layer["kind"] for program in programs for layer in program.layers}
    assert kinds == {
        *("linear", "square", "embedding", "bag", "experts", "convolution", "norm", "loose", "checkpointed"),
    }
    text = "\n".join(program.to_json() for program in programs)
    for value in (
        *('"sparse":true', '"tied_to":0', '"channels_last":true', '"shape":[]', '"shape":[0,4]', '"dtype":"complex64"'),
        *('"dtype":"bfloat16"', '"dtype":"float16"', '"dtype":"float64"', '"sync":false', '"forwards":2', '"nan"'),
        *('"idle":true', '"penalty":true', '"1e-40"', '"-0.0"', '"static_graph":true', '"native":false', '"join":[3'),
        *('"gradient_as_bucket_view":true', '"zero":"keep"', '"zero":"zeros"', '"optimizer":"adamw"', '"clip":1.0'),
        *(
            '"policy":"auto"',
            '"skip_zeros":"adaptive"',
            '"rebuild_after":2',
            '"buffer_sync":"changed"',
            '"at":"outputs"',
        ),
        *(
            '"skip_zero_rows":"on"',
            '"skip_zero_rows":"adaptive"',
            '"use":"twice"',
            '"use":"head"',
            '"gathers":true',
            '"prunes":true',
        ),
        *('"autocast":"bfloat16"', '"autocast":"float16"', '"via":"function"', '"via":"hook"', '"where":"used"'),
        *('"declare":"once"', '"declare":"block"', '"how":"package"', '"kind":"tensor"', '"kind":"accumulate"'),
    ):
        assert value in text, value
    for value in ('"coded":"on"', '"coded":"off"', '"coded":"auto"') if HAS_CODED else ():
        assert value in text, value
    joins = [program for program in programs if program.options.join is not None]
    assert any(operation["do"] == "rebuild" for program in joins for operation in program.operations)
    assert any(
        program.options.policy == {"name": "allreduce", "skip_unused": False, "rebuild_after": 0} for program in joins
    )
    assert any(program.options.fills_memory for program in joins)
    exchanged = [odd for program in programs for one in program.operations for odd in one.get("odd", ())]
    assert {kind for odd in exchanged for kind in odd["kinds"]} == {*KINDS, None}
    for kind in ("linear", "square", "embedding", "bag", "experts", "convolution", "loose", "checkpointed"):
        assert any(odd["on"].startswith(f"layers.{kind}") for odd in exchanged), kind


def exact_in(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return numbers.to(dtype).to(numbers.dtype) == numbers


@pytest.mark.parametrize("kind", KINDS)
def test_odd_gradients(kind: str) -> None:
    """They are what their kind says, but for a few numbers or none, and the same for the same seed."""
    holds = {
        "bfloat16": lambda x: exact_in(x, torch.bfloat16),
        "float16": lambda x: exact_in(x, torch.float16),
        "float32": lambda x: exact_in(x, torch.float32),
        "24 bits": lambda x: exact_in(x, torch.float32) & (x.float().view(torch.int32) & 255 == 0),
        "signed zeros": lambda x: x == 0,
    }
    other_counts = set()
    for seed in range(40):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            gradient = torch.zeros(20, 30, dtype=dtype)
            gradient[3:5] = 1.0
            odd = {"on": "a.weight", "where": "used" if seed % 2 else "all"}
            numbers = odd_gradient(gradient, odd, kind, seed)
            assert (numbers.dtype, numbers.shape) == (dtype, gradient.shape)
            again = odd_gradient(gradient, odd, kind, seed)
            assert torch.equal(again.view(torch.uint8), numbers.view(torch.uint8))
            assert not torch.equal(odd_gradient(gradient, {**odd, "on": "b"}, kind, seed), numbers) or kind[0] == "s"
            if seed % 2:
                assert torch.equal(numbers[gradient == 0], gradient[gradient == 0])
            elif kind in holds and dtype is torch.float64:
                other_counts.add(int((~holds[kind](numbers)).sum()))
            elif kind == "mixed" and dtype is torch.float32:
                assert numbers.isnan().any()
                assert numbers.isinf().any()
                assert ((numbers != 0) & (numbers.abs() < torch.finfo(torch.float32).smallest_normal)).any()
                assert len(numbers.view(torch.int32)[numbers.isnan()].unique()) >= 5
            assert kind == "mixed" or numbers.isfinite().all()
    if kind == "signed zeros":
        assert other_counts == {0}
    elif kind != "mixed":
        assert {0, 1} < other_counts
        assert max(other_counts) < 30


# --- hooks that are wrong


def _broken(ddp: DistributedDataParallel, policy: ddp_hooks.Policy, hook: Any) -> ddp_hooks.SkipUnusedState:
    state = ddp_hooks.SkipUnusedState(ddp, policy)
    ddp.register_comm_hook(state, hook)
    return state


def drops_a_gradient(ddp: DistributedDataParallel, policy: ddp_hooks.Policy, native: bool) -> Any:
    """Register a hook that loses the last gradient of each bucket that has two."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations as objects
        def drop(future: Any) -> torch.Tensor:
            if len(bucket.gradients()) > 1 and not future.value().is_sparse:
                bucket.gradients()[-1].zero_()
            return future.value()

        return ddp_hooks.skip_unused_hook(state, bucket).then(drop)

    return _broken(ddp, policy, hook)


def skips_what_one_rank_uses(ddp: DistributedDataParallel, policy: ddp_hooks.Policy, native: bool) -> Any:
    """Register a hook that believes rank 0 alone about what is used."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations as objects
        unused: list[Any] = [[not bool(gradient.count_nonzero()) for gradient in bucket.gradients()]]
        if bucket.buffer().is_sparse:
            return ddp_hooks.skip_unused_hook(state, bucket)
        dist.broadcast_object_list(unused, src=0)

        def skip(future: Any) -> torch.Tensor:
            for gradient, is_unused in zip(bucket.gradients(), unused[0], strict=True):
                if is_unused:
                    gradient.zero_()
            return future.value()

        return ddp_hooks.skip_unused_hook(state, bucket).then(skip)

    return _broken(ddp, policy, hook)


def rounds_what_is_nearly_exact(ddp: DistributedDataParallel, policy: ddp_hooks.Policy, native: bool) -> Any:
    """Register a hook that sends gradients in 16 bits if the first few numbers are exactly that."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations as objects
        buffer = bucket.buffer()
        if buffer.dtype is torch.float32 and not buffer.is_sparse:
            for gradient in bucket.gradients():
                for dtype in (torch.bfloat16, torch.float16):
                    numbers = gradient.to(dtype).to(torch.float32)
                    if torch.equal(numbers.flatten()[:4], gradient.flatten()[:4]):
                        gradient.copy_(numbers if bool(gradient.flatten()[:4].all()) else gradient)
                        break
        return ddp_hooks.skip_unused_hook(state, bucket)

    return _broken(ddp, policy, hook)


def without_rebuilding(program: Program) -> Program:
    """Take out what asks for the hook of this package itself."""
    program.operations = [one for one in program.operations if one["do"] not in ("rebuild", "policy")]
    program.options.policy = "skip_unused"
    return program


@pytest.mark.thorough
@pytest.mark.parametrize(
    "register",
    [drops_a_gradient, skips_what_one_rank_uses, rounds_what_is_nearly_exact],
    ids=lambda f: f.__name__,
)
def test_finds_and_shrinks(register: Any) -> None:
    for seed in range(20):
        program = without_rebuilding(generate(seed, 2))
        verdict = judge(program, register)
        if verdict.kind == "differs":
            break
    else:
        pytest.fail("20 programs did not show a hook that is wrong")
    assert "gradient of" in verdict.report
    small, small_verdict = shrink(program, verdict, seconds=10, register=register)
    assert small_verdict.kind == "differs"
    assert len(small.to_json()) < len(program.to_json())
    assert len(small.operations) <= 3, small
    assert judge(Program.from_json(json.dumps(json.loads(small.to_json())))).kind == "same"
