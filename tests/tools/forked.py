"""Forks ranks from a parent that has imported torch once, watches them, and shows the stacks of those that hang.

A rank costs a few milliseconds to start this way, so that whole programs can be run by the hundred, from their first
line to what the interpreter does after their last. Forking is sound as long as the parent has one thread and no process
group, which :func:`prepare_parent` checks.

The child returns out of the parent's own functions: where :func:`fork_rank` returns None, the caller is the rank, and
what it returns to ends the program as any program ends, with atexit functions, threads that are joined and the
interpreter's finalization.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

# A rank that is asked for its stack writes it at once; a signal handler of faulthandler needs no GIL.
STACK_SECONDS = 0.3
GDB_SECONDS = 60
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
TERMINATED = "terminate called without an active exception"
PYTHON_IN_STACK = "<omitting python frames>"
OURS_IN_STACK = re.compile(r"ddp_hooks::|ddp_hooks/_C\b")


def prepare_parent() -> None:
    """Import what ranks import, the modules that torch imports late included; leave the process with one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch._dynamo  # DistributedDataParallel imports it, which takes seconds
    import torch.distributed.algorithms.join

    # Before a group is there: the defaults of its functions (group=group.WORLD) would keep the group alive for good.
    import torch.distributed.nn.functional
    import torch.profiler._cupti_monitor
    import torch.utils.data

    import ddp_hooks  # noqa: F401

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    # What is imported is not looked at again by collections in the ranks, nor copied for them.
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"expected one thread, so that forking is sound; found {threads}"


@dataclass
class Rank:
    """A forked process; `directory` is where it leaves what others may read."""

    rank: int
    pid: int
    directory: Path
    started: float = field(default_factory=time.monotonic)
    # As subprocess counts them: negative is the signal that ended it; None while it runs, and when it was killed here.
    code: int | None = None
    hung: bool = False
    stacks: str = ""
    seconds: float = 0.0
    # For who watches it: the number of what it does at the time.
    last_call: int = -1

    @property
    def ended(self) -> bool:
        return self.code is not None or self.hung

    def hangs_in(self) -> list[str]:
        """Name the hook's functions and torch's destructors on the stacks of what hung; the innermost first."""
        frames = re.findall(r"in ((?:ddp_hooks::|c10d::Reducer::~)[\w:~]+)", self.stacks)
        return list(dict.fromkeys(frames))

    def hangs_in_torch_alone(self) -> bool:
        """Whether torch's destructor waits for threads of the group."""
        return self.hung and self.hangs_in() == ["c10d::Reducer::~Reducer"]

    def crashing_stack(self) -> str:
        """The native stack of the thread that ended the rank; empty where it was not printed."""
        return next((stack for stack in self._native_stacks() if "::fatalSignalHandler(" in stack), "")

    def crashes_in_torch_alone(self) -> bool:
        """Whether a thread that torch started came for the GIL when the interpreter was gone.

        Python up to 3.13 then ends the thread by unwinding its stack, and C++ ends the process at the first function
        that throws nothing. A process group's thread does so that lets go of a work's tensors, or calls a future's
        callbacks, while the program ends: plain DDP's programs end so as well, which is a matter of milliseconds.
        """
        # The first to notice may be pybind11's own lock on the GIL, which is let go of on the way, or what asks for the
        # thread's state then; Python says so.
        noticed = r"^Fatal Python error: (_PyThreadState_DeleteCurrent|PyThreadState_Get): .*\nPython runtime state: f"
        if re.search(noticed, self.output(), re.MULTILINE):
            return not any(OURS_IN_STACK.search(stack) for stack in self._native_stacks())
        # What asks for the thread's state may also find the interpreter's gone; torch leaves out Python's own frames.
        if self.code == -signal.SIGSEGV:
            stack = self.crashing_stack()
            return "ProcessGroup" in stack and PYTHON_IN_STACK in stack and not OURS_IN_STACK.search(stack)
        # The stacks may get lost, too. C++ says this of a thread that is unwound, and of one that nobody has joined
        # when its object goes; this package detaches those that it starts.
        if TERMINATED in self.output() and not self._native_stacks():
            return True
        # The main thread may run into the same, so that more than one is on its way out.
        unwound = [stack for stack in self._native_stacks() if "_Unwind_" in stack]
        # Threads that write at once may write over each other, and over what C++ says before it ends the process.
        is_known = bool(unwound) and (TERMINATED in self.output() or "__gxx_personality_v0" in unwound[0])
        return is_known and all("ProcessGroup" in stack and not OURS_IN_STACK.search(stack) for stack in unwound)

    def hangs_in_torchs_crash(self) -> bool:
        """Whether a rank that crashed so could not print its stacks, as another thread held malloc's lock then.

        What printed nothing has to be read from gdb's stacks; where there is no gdb, only C++'s message tells.
        """
        if not self.hung or TERMINATED not in self.output():
            return False
        threads = [part for part in re.split(r"^(?=Thread \d+ \()", self.stacks, flags=re.MULTILINE) if "#0 " in part]
        unwound = [stack for stack in threads if "_Unwind_ForcedUnwind" in stack]
        return bool(unwound or not threads) and not any(OURS_IN_STACK.search(stack) for stack in unwound)

    def goes_wrong_in_torch_alone(self) -> bool:
        """Whether torch's code ends a rank, or keeps it from ending, with the hook nowhere near; plain DDP does so."""
        if self.hung:
            return self.hangs_in_torch_alone() or self.hangs_in_torchs_crash()
        return self.crashes_in_torch_alone()

    def _native_stacks(self) -> list[str]:
        return re.split(r"^SIG\w+\(\d+\), PID: ", self.output(), flags=re.MULTILINE)[1:]

    def output(self) -> str:
        return self._read("output")

    def python_stacks(self) -> str:
        return self._read("stack")

    def _read(self, name: str) -> str:
        path = self.directory / f"{name}{self.rank}"
        return path.read_text(errors="replace") if path.exists() else ""


def fork_rank(rank: int, directory: Path) -> Rank | None:
    """Return the new process, or None in it. Its output goes to a file, and it leads a process group of its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Rank(rank, pid, directory)
    os.setpgid(0, 0)
    # It dies with its parent, whatever ends that.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(directory / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    import torch

    # Of all threads, native ones, when a signal is about to end the process. Before Python's own handler, which leaves
    # what it has found here when the interpreter goes. It takes SIGINT as well, which Python gets back.
    interrupt = signal.getsignal(signal.SIGINT)
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    signal.signal(signal.SIGINT, interrupt)
    stacks = os.open(directory / f"stack{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    # Lives as long as the process; a crash of the interpreter is described there, too.
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks, all_threads=True)
    return None


def poll(ranks: Sequence[Rank]) -> bool:
    """Note which ranks have ended; return whether all have."""
    for rank in ranks:
        if not rank.ended:
            pid, status = os.waitpid(rank.pid, os.WNOHANG)
            if pid:
                rank.code = os.waitstatus_to_exitcode(status)
                rank.seconds = time.monotonic() - rank.started
                _kill_group(rank)  # workers of a DataLoader may outlive it for seconds
    return all(rank.ended for rank in ranks)


def wait(ranks: Sequence[Rank], limit_seconds: float, native_stacks: bool) -> None:
    """Wait until all have ended; kill those that have not in time, their stacks taken first."""
    deadline = time.monotonic() + limit_seconds
    pause = 0.002
    hanging: list[Rank] = []
    try:
        while not poll(ranks) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(pause * 1.2, 0.02)
        hanging = [rank for rank in ranks if not rank.ended]
        # All of them before the first is killed, because that may wake up the others.
        for rank in hanging:
            rank.stacks = _stacks_of(rank, native_stacks)
    finally:
        for rank in ranks:
            if not rank.ended:
                rank.hung = rank in hanging
                rank.seconds = time.monotonic() - rank.started
                kill(rank)


def kill(rank: Rank) -> None:
    """Kill a rank and the processes that it has started."""
    _kill_group(rank)
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(rank.pid, signal.SIGKILL)
        os.waitpid(rank.pid, 0)


def _kill_group(rank: Rank) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.pid, signal.SIGKILL)


def _stacks_of(rank: Rank, native: bool) -> str:
    parts = []
    if native and shutil.which("gdb") is not None:
        command = ["gdb", "-p", str(rank.pid), "-batch", "-ex", "set pagination off", "-ex", "thread apply all bt 30"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=GDB_SECONDS, check=False)
            lines = done.stdout.splitlines()
            first = next((i for i, line in enumerate(lines) if line.startswith("Thread ")), 0)
            parts.append("\n".join(line[:240] for line in lines[first:]))
        except subprocess.TimeoutExpired:
            parts.append(f"(gdb said nothing within {GDB_SECONDS} s)")
    os.kill(rank.pid, signal.SIGUSR1)
    time.sleep(STACK_SECONDS)
    parts.append(rank.python_stacks() or "(no Python stack)")
    return "\n".join(parts)
