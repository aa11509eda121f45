"""How ranks that crash or hang at their end are judged: what is torch's is told from what has the hook on its stack."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import PYTHON_IN_STACK, Rank

TERMINATED = "terminate called without an active exception\n"
MAIN = """Thread 1 (Thread 0x7fdbad1ffb80 (LWP 28618) "python"):
#0  futex_wait (private=0, expected=2) at ../sysdeps/nptl/futex-internal.h:146
#1  __GI___libc_malloc (bytes=1432) at ./malloc/malloc.c:3321
#2  0x00007fdbabf51c4f in c10::FatalSignalHandler::stacktraceSignalHandler(bool) () from torch/lib/libc10.so
"""
UNWOUND = """Thread 3 (Thread 0x7fdb89fd36c0 (LWP 28622) "pt_gloo_runloop" (Exiting)):
#0  futex_wait (private=0, expected=0) at ../sysdeps/nptl/futex-internal.h:146
#1  0x00007fdbabf5211e in c10::FatalSignalHandler::fatalSignalHandler(int, siginfo_t*) () from torch/lib/libc10.so
#2  0x00007fdbabe7f1b0 in _Unwind_ForcedUnwind () from libgcc_s.so.1
#3  0x00007fdbace4f969 in take_gil (tstate=0x7fdb7c00aac0) at Python/ceval_gil.h:289
#4  {frame}
"""
TORCHS = "0x00007fdb9c111517 in c10d::ProcessGroupGloo::runLoop(int) () from torch/lib/libtorch_cpu.so"
OURS = "0x00007fdb9c111517 in ddp_hooks::Engine::close() () from ddp_hooks/_C.so"


@pytest.mark.parametrize(
    ("output", "stacks", "expected"),
    [
        (TERMINATED, UNWOUND.format(frame=TORCHS) + MAIN, True),
        (TERMINATED, MAIN + UNWOUND.format(frame=TORCHS), True),
        (TERMINATED, UNWOUND.format(frame=OURS) + MAIN, False),
        # Nobody is unwound: it was not this that ended it.
        (TERMINATED, MAIN, False),
        # It hangs without having crashed.
        ("", UNWOUND.format(frame=TORCHS) + MAIN, False),
        # No gdb.
        (TERMINATED, "(no Python stack)", True),
    ],
)
def test_hangs_in_torchs_crash(output: str, stacks: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "output0").write_text(output)
    rank = Rank(0, pid=0, directory=tmp_path, hung=True, stacks=stacks)
    assert rank.hangs_in_torchs_crash() is expected


@pytest.mark.parametrize(("frame", "expected"), [(TORCHS, True), (OURS, False)])
def test_crashes_in_torch_alone(frame: str, expected: bool, tmp_path: Path) -> None:
    printed = f"SIGABRT(6), PID: 1, Thread 3:\nframe #0: _Unwind_ForcedUnwind\nframe #1: {frame}\n"
    (tmp_path / "output0").write_text(TERMINATED + printed)
    assert Rank(0, pid=0, directory=tmp_path, code=-6).crashes_in_torch_alone() is expected


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [(PYTHON_IN_STACK, TORCHS, True), (PYTHON_IN_STACK, OURS, False), ("at::empty", TORCHS, False)],
)
def test_the_interpreter_is_gone(inner: str, outer: str, expected: bool, tmp_path: Path) -> None:
    handler = "c10::FatalSignalHandler::fatalSignalHandler(int, siginfo_t*)"
    printed = f"SIGSEGV(11), PID: 1, Thread 3:\nframe #0: {handler}\n{inner}\nframe #2: {outer}\n"
    (tmp_path / "output0").write_text(printed)
    assert Rank(0, pid=0, directory=tmp_path, code=-11).crashes_in_torch_alone() is expected


def test_a_rank_that_has_ended_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "output0").write_text(TERMINATED)
    assert not Rank(0, pid=0, directory=tmp_path, code=-6).hangs_in_torchs_crash()
