"""Runs small trainings from their first line to the interpreter's last, each ending in another way, by the hundred.

    python tests/campaigns/ends.py --runs 500 --registration native
    python tests/campaigns/ends.py --runs 20 --registration plain native python --seed 7
    python tests/campaigns/ends.py --seed 123 --runs 1 --stack --verbose

Each seed is one program: which objects are held by what, in which order they go, when the process groups are destroyed,
what goes wrong and how the process ends. Run number i has the seed `--seed` + i, so that each can be had by itself.

A run *hung* if a rank has not ended in time, *crashed* if a signal ended one that nobody sent, and has a *wrong exit
code* if a rank ended with another one than the program says. What went wrong with the hook is run again with plain DDP,
several times: where that goes wrong too, it is counted as torch's, and so is what ends in torch's code with the hook
nowhere on the stack (see forked.py). `--registration plain` says how often that is.

The processes are forked, but they are not spared anything: a rank returns out of the main function below, and ends as
any program does, with atexit functions, threads that are joined and Py_Finalize.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from forked import Rank, fork_rank, prepare_parent, wait

# Where a rank waits for one that is gone, this is how long it may take; and some of them wait twice.
COLLECTIVE_TIMEOUT_SECONDS = 4.0
LIMIT_SECONDS = 30.0
# How a run may go wrong; and how the table calls what plain DDP does as well.
WRONG = ("hung", "crashed", "wrong code")
AS_PLAIN = "as plain DDP"
REGISTRATIONS = ("plain", "native", "python")
# How often plain DDP may try to go wrong where the hook did.
COMPARISONS = 3

EXITS = ("end", "sys.exit(0)", "sys.exit(3)", "exception", "os._exit(5)", "SIGTERM", "SIGINT")
TROUBLES = ("none", "forward", "backward", "gradient", "between", "timer SIGTERM", "timer SIGINT")
LASTS = ("nothing", "broadcast", "async", "verify", "broadcast_parameters", "barrier")
COMPANIES = ("nobody", "thread", "loader", "wrapped twice", "wrapped in turn")
# Objects whose order of death matters; not every program has all of them.
THINGS = ("ddp", "state", "group", "model", "outputs", "gradients", "optimizer", "loader", "work", "other")
# `local`: goes at its turn. `thread`, `callback`: so, on another thread. `cycle`: at the next collection after its
# turn. `global`: with the interpreter.
HOLDERS = ("local", "thread", "callback", "cycle", "global")


class Trouble(Exception):
    """What a program raises by itself."""


class Terminated(SystemExit):
    """What the handler of SIGTERM raises."""


@dataclass(frozen=True)
class Program:
    """One way to train a little and to end; the same on every rank, but for who is in trouble."""

    seed: int
    policy: str
    find_unused: bool
    own_group: bool
    rebuilt: bool
    company: str
    trouble: str
    # Ranks in trouble; the others learn of it from their process groups.
    troubled: tuple[int, ...]
    # Whether they catch what was raised and go on to the end of the program.
    caught: bool
    # When the timer goes off, from the beginning of the first step.
    timer_seconds: float
    last: str
    holders: tuple[tuple[str, str], ...]
    # What happens at the end, in order: a thing's name means that it goes.
    actions: tuple[str, ...]
    # Whether they go as a function's locals do, one right after the other; `destroy` then comes before them, or after.
    at_once: bool
    destroy: str
    exit: str

    @staticmethod
    def random(seed: int, ranks: int) -> Program:
        rng = random.Random(seed)
        calm = rng.random() < 0.6
        trouble = "none" if calm else rng.choice(TROUBLES[1:])
        # Holding a thing as a local is what most programs do.
        holders = {name: "local" if rng.random() < 0.55 else rng.choice(HOLDERS[1:]) for name in THINGS}
        actions = list(THINGS)
        rng.shuffle(actions)
        destroy = rng.choice(("first", "between", "last", "never"))
        if destroy != "never":
            place = {"first": 0, "between": rng.randrange(1, len(actions)), "last": len(actions)}[destroy]
            actions.insert(place, "destroy")
        if rng.random() < 0.5:
            actions.insert(rng.randrange(len(actions) + 1), "collect")
        at_once = rng.random() < 0.5
        if at_once and rng.random() < 0.5:
            # A training function as most are: all are locals, made in this order; not every one has all of them.
            holders = dict.fromkeys(THINGS, "local")
            early = [name for name in actions[: actions.index("ddp")] if name in THINGS]
            actions = [name for name in early if name not in ("group", "state")] + ["ddp", "group", "state"]
            actions += [name for name in THINGS if name not in actions]
            destroy = rng.choice(("first", "never"))
            actions = ["destroy", *actions] if destroy == "first" else actions
        everyone = tuple(range(ranks))
        return Program(
            seed=seed,
            policy=rng.choice(("skip_unused", "skip_unused", "skip_zeros", "auto", "allreduce")),
            find_unused=rng.random() < 0.75,
            own_group=rng.random() < 0.3,
            rebuilt=rng.random() < 0.2,
            company=rng.choice(COMPANIES) if rng.random() < 0.5 else "nobody",
            trouble=trouble,
            troubled=() if calm else rng.choice((everyone, *((rank,) for rank in everyone))),
            caught=rng.random() < 0.4,
            timer_seconds=rng.random() * 0.04,
            last=rng.choice(LASTS),
            holders=tuple(holders.items()),
            actions=tuple(actions),
            at_once=at_once,
            destroy=destroy,
            exit="end" if rng.random() < 0.5 else rng.choice(EXITS),
        )

    def allowed_codes(self, rank: int) -> set[int]:
        """Exit codes that a rank may have."""
        codes = {
            "end": {0},
            "sys.exit(0)": {0},
            "sys.exit(3)": {3},
            "exception": {1},
            "os._exit(5)": {5},
            "SIGTERM": {143},
            "SIGINT": {-signal.SIGINT},
        }[self.exit]
        if self.trouble == "none":
            return codes
        if rank not in self.troubled:
            # It may have had all it needed from the other, and otherwise gets an error.
            return codes | {1}
        if self.trouble.startswith("timer"):
            # It may come too late, or where an error of the other rank's leaving is on its way.
            return codes | {1, 143 if self.trouble.endswith("SIGTERM") else -signal.SIGINT}
        # With everybody in trouble at once, a rank may learn of another's before it comes to its own.
        return codes | {1} if self.caught else {1}


def train(program: Program, registration: str, rank: int, ranks: int, store: str) -> dict[str, Any]:
    """Train for two steps; return what there is to hold."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import ddp_hooks

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS),
    )
    torch.manual_seed(0)
    group = dist.new_group(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)) if program.own_group else None

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = torch.nn.Linear(8, 16)
            self.branches = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))

        def forward(self, batch: torch.Tensor, trouble: str) -> torch.Tensor:
            inner = torch.tanh(self.trunk(batch))
            if trouble == "forward":
                raise Trouble(trouble)
            if trouble == "backward":
                inner.register_hook(fail)
            if program.find_unused:
                return self.branches[0](inner)
            return self.branches[1](self.branches[0](inner))

    def wrap(model: torch.nn.Module) -> tuple[DistributedDataParallel, Any]:
        ddp = DistributedDataParallel(model, find_unused_parameters=program.find_unused, process_group=group)
        if registration == "plain":
            return ddp, None
        if registration == "native":
            return ddp, ddp_hooks.register(ddp, program.policy)
        state = ddp_hooks.SkipUnusedState(ddp, program.policy)
        ddp.register_comm_hook(state, ddp_hooks.skip_unused_hook)
        return ddp, state

    model = Model()
    things: dict[str, Any] = {"model": model, "other": None, "loader": None, "work": None}
    if program.company == "wrapped in turn":
        for _ in range(2):
            ddp, state = wrap(model)
            ddp(torch.ones(2, 8), "none").sum().backward()
            del ddp, state
    things["ddp"], things["state"] = wrap(model)
    if program.company == "wrapped twice":
        things["other"] = wrap(model if program.seed % 2 else Model())
    things["group"] = things["ddp"].process_group
    things["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    if program.company == "thread":
        threading.Thread(target=compute, daemon=True).start()
    if program.company == "loader":
        dataset = [torch.full((8,), float(i)) for i in range(16)]
        things["loader"] = iter(torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=1))
    in_trouble = rank in program.troubled
    if in_trouble and program.trouble.startswith("timer"):
        number = signal.SIGTERM if program.trouble.endswith("SIGTERM") else signal.SIGINT
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(number))
        signal.setitimer(signal.ITIMER_REAL, max(program.timer_seconds, 1e-4))
    for step in range(2):
        if step == 1 and in_trouble and program.trouble == "between":
            raise Trouble("between")
        if step == 1 and program.rebuilt and registration != "plain" and program.find_unused:
            ddp_hooks.freeze(things["ddp"], "branches.1")
            ddp_hooks.rebuild(things["ddp"])
        trouble = program.trouble if step == 1 and in_trouble else "none"
        if trouble == "gradient":
            things["trouble"] = model.trunk.weight.register_hook(fail)
        batch = next(things["loader"]) if things["loader"] is not None else torch.ones(2, 8)
        things["outputs"] = things["ddp"](batch, trouble)
        things["outputs"].sum().backward()
        if things["other"] is not None:
            things["other"][0](batch, "none").sum().backward()
        things["gradients"] = [p.grad for p in model.parameters()]
        things["optimizer"].step()
        things["optimizer"].zero_grad()
        if step == 0:
            # The graph of the last step stays; it holds a part of the module.
            del things["outputs"]
    things["work"] = last_collective(program, rank, things)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return things


def last_collective(program: Program, rank: int, things: dict[str, Any]) -> Any:
    """Start the program's last collective; return its work, if it has one."""
    import torch
    import torch.distributed as dist

    import ddp_hooks

    ddp = things["ddp"]
    if program.last == "verify":
        ddp_hooks.sync.verify_replicas(ddp, gradients=False, process_group=ddp.process_group)
    elif program.last == "broadcast_parameters":
        ddp_hooks.sync.broadcast_parameters(ddp, process_group=ddp.process_group)
    elif program.last == "barrier":
        dist.barrier()
    elif program.last in ("broadcast", "async"):
        work = None
        for parameter in ddp.module.parameters():
            work = dist.broadcast(parameter.detach(), 0, group=ddp.process_group, async_op=True)
            if program.last == "broadcast":
                work.wait()
        return work
    else:
        # Something for callbacks to be called by, where the program has no collective of its own.
        return (
            dist.all_reduce(torch.zeros(1), group=ddp.process_group, async_op=True) if has_callbacks(program) else None
        )
    return None


def has_callbacks(program: Program) -> bool:
    return "callback" in dict(program.holders).values()


def fail(gradient: Any) -> None:
    raise Trouble("in a hook on a gradient")


def compute() -> None:
    while True:
        sum(range(1000))


def let_go(program: Program, rank: int, things: dict[str, Any]) -> None:
    """Take the program's objects from their holders, in its order."""
    import torch.distributed as dist

    holders = dict(program.holders)
    if "callback" in holders.values() and things.get("work") is not None:
        future = things["work"].get_future()
        box = {name: things.pop(name) for name in THINGS if holders[name] == "callback" and name in things}
        future.add_done_callback(ClearedByCallback(box))
        del future, box
    locals_in_order: dict[str, Any] = {}
    for action in program.actions:
        if action == "destroy":
            if not (program.at_once and program.destroy == "first"):
                locals_in_order.clear()
            dist.destroy_process_group()
        elif action == "collect":
            locals_in_order.clear()
            gc.collect()
        elif action not in things:
            pass
        elif program.at_once and holders[action] in ("local", "callback"):
            locals_in_order[action] = things.pop(action)
        else:
            drop(holders[action], action, things)
    # No bytecode runs between one and the next, so that nobody else gets the interpreter's lock meanwhile.
    locals_in_order.clear()


class ClearedByCallback:
    """Lets go of things in a callback of a future, in a thread of the process group if that is still under way."""

    def __init__(self, box: dict[str, Any]) -> None:
        self.box = box

    def __call__(self, future: Any) -> None:
        time.sleep(0.03)
        self.box.clear()


def drop(holder: str, name: str, things: dict[str, Any]) -> None:
    box = [things.pop(name)]
    if holder == "cycle":
        box.append(box)
    elif holder == "thread":
        # Not a daemon: the interpreter waits for it.
        threading.Thread(target=clear_later, args=(box,)).start()
    elif holder == "global":
        globals()[f"left_{name}"] = box


def clear_later(box: list[Any]) -> None:
    time.sleep(0.005)
    box.clear()


def run_rank(program: Program, registration: str, rank: int, ranks: int, store: str) -> int | None:
    """What a rank does; what it returns or raises ends its process."""
    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        things = train(program, registration, rank, ranks, store)
    except (Trouble, Terminated, KeyboardInterrupt) as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not program.caught:
            raise
        # What the failed function held lives as long as this, and goes with it.
        print(f"caught {error!r}", file=sys.stderr)
        things = {}
        del error
        if program.destroy != "never":
            import torch.distributed as dist

            dist.destroy_process_group()
    let_go(program, rank, things)
    return leave(program.exit)


def leave(how: str) -> int | None:
    if how == "exception":
        raise Trouble("at the end")
    if how == "os._exit(5)":
        sys.stderr.flush()
        os._exit(5)
    if how in ("SIGTERM", "SIGINT"):
        signal.raise_signal(getattr(signal, how))
        time.sleep(1)
    return {"sys.exit(0)": 0, "sys.exit(3)": 3}.get(how)


def terminate(*_: Any) -> None:
    raise Terminated(143)


@dataclass
class Verdict:
    """How one run went."""

    program: Program
    registration: str
    ranks: list[Rank]
    seconds: float

    @property
    def kind(self) -> str:
        if any(rank.hung for rank in self.ranks):
            return "hung"
        wrong = [rank for rank in self.ranks if rank.code not in self.program.allowed_codes(rank.rank)]
        if any(rank.code is not None and rank.code < 0 for rank in wrong):
            return "crashed"
        return "wrong code" if wrong else "ok"

    def where(self) -> list[str]:
        return list(dict.fromkeys(place for rank in self.ranks for place in rank.hangs_in()))

    def is_torch_alone(self) -> bool:
        if self.kind == "hung":
            wrong = [rank for rank in self.ranks if rank.hung]
        elif self.kind == "crashed":
            wrong = [rank for rank in self.ranks if rank.code not in self.program.allowed_codes(rank.rank)]
        else:
            return False
        return all(rank.goes_wrong_in_torch_alone() for rank in wrong)

    def describe(self, with_stacks: bool) -> str:
        lines = [f"{self.registration}: seed {self.program.seed}: {self.kind} after {self.seconds:.1f} s"]
        if self.where():
            lines[0] += f" in {', '.join(self.where())}"
        lines.append(describe(self.program))
        for rank in self.ranks:
            code = "hung" if rank.hung else f"exit code {rank.code}"
            lines.append(f"--- rank {rank.rank}: {code}, expected {sorted(self.program.allowed_codes(rank.rank))}")
            lines += rank.output().rstrip().splitlines()[-12:]
            if with_stacks:
                lines.append(rank.stacks or rank.crashing_stack() or rank.python_stacks())
        return "\n".join(lines)


def describe(program: Program) -> str:
    values = {f.name: getattr(program, f.name) for f in fields(program) if f.name != "seed"}
    values["holders"] = {name: holder for name, holder in program.holders if holder != "local"}
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def rows_of(program: Program) -> list[str]:
    """The rows of the table that a run counts in."""
    holders = dict(program.holders)
    return [
        f"exit: {program.exit}",
        f"trouble: {program.trouble}",
        f"destroy: {program.destroy}",
        f"last: {program.last}",
        f"company: {program.company}",
        f"policy: {program.policy}",
        f"ddp held by: {holders['ddp']}",
        f"state held by: {holders['state']}",
        f"group held by: {holders['group']}",
    ]


def print_table(kinds: list[tuple[Program, str]]) -> None:
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for program, kind in kinds:
        for row in rows_of(program):
            rows[row].update(["runs", kind])
    columns = ("runs", *WRONG, AS_PLAIN)
    print(f"\n{'kind of end':36}" + "".join(f"{column:>14}" for column in columns))
    before = ""
    for row in sorted(rows):
        section = row.partition(":")[0]
        if before not in ("", section):
            print()
        before = section
        print(f"{row:36}" + "".join(f"{rows[row][column] or '':>14}" for column in columns))


class Runner:
    """Runs programs. Every method may return in a rank, too, with what its process has to end with."""

    def __init__(self, options: argparse.Namespace, directory: str) -> None:
        self.options = options
        self.directory = directory
        self.is_rank = False
        self.ends_with: int | None = None

    def run(self, program: Program, registration: str) -> Verdict | None:
        """Return the verdict; None in a rank."""
        directory = Path(tempfile.mkdtemp(dir=self.directory))
        started = time.monotonic()
        ranks: list[Rank] = []
        for number in range(self.options.ranks):
            rank = fork_rank(number, directory)
            if rank is None:
                self.is_rank = True
                self.ends_with = run_rank(program, registration, number, self.options.ranks, str(directory / "store"))
                return None
            ranks.append(rank)
        wait(ranks, self.options.limit, native_stacks=True)
        return Verdict(program, registration, ranks, time.monotonic() - started)

    def judge(self, program: Program, registration: str) -> tuple[Verdict, str] | None:
        """Run a program; what goes wrong and is the hook's fault keeps its kind. None in a rank."""
        verdict = self.run(program, registration)
        if verdict is None:
            return None
        if verdict.kind != "ok" or self.options.verbose:
            print(verdict.describe(self.options.stack), flush=True)
        if verdict.kind == "ok" or registration == "plain" or self.options.no_comparison:
            return verdict, verdict.kind
        if verdict.is_torch_alone():
            print("    as plain DDP: the hook is not on the stack\n", flush=True)
            return verdict, AS_PLAIN
        for _ in range(COMPARISONS):
            plain = self.run(program, "plain")
            if plain is None:
                return None
            if plain.kind != "ok":
                print(f"    as plain DDP: {plain.kind}\n", flush=True)
                return verdict, AS_PLAIN
        print(f"    plain DDP: ok, {COMPARISONS} times\n", flush=True)
        return verdict, verdict.kind


def main() -> int | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="with each registration")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after this time")
    parser.add_argument("--registration", nargs="+", default=["native"], choices=REGISTRATIONS, help="taking turns")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the others count up from it")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--only",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="leave out other programs, as in trouble=none",
    )
    parser.add_argument(
        "--stack", action="store_true", help="print the stacks of what goes wrong, with gdb's if it is there"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds after which a run hangs")
    parser.add_argument("--no-comparison", action="store_true", help="do not run plain DDP where the hook goes wrong")
    parser.add_argument("--verbose", action="store_true", help="describe every run")
    options = parser.parse_args()
    prepare_parent()
    only = [condition.split("=", 1) for condition in options.only]
    began = time.monotonic()
    # Not a TemporaryDirectory, which every rank would remove when it ends.
    directory = tempfile.mkdtemp(prefix="ddp_hooks_ends_")
    runner = Runner(options, directory)
    judged: dict[str, list[tuple[Verdict, str]]] = {registration: [] for registration in options.registration}
    seed = options.seed
    try:
        while len(judged[options.registration[-1]]) < options.runs and time.monotonic() - began < options.seconds:
            program = Program.random(seed, options.ranks)
            seed += 1
            if not all(str(getattr(program, name)) == value for name, value in only):
                continue
            for registration in options.registration:
                outcome = runner.judge(program, registration)
                if outcome is None:
                    return runner.ends_with
                judged[registration].append(outcome)
    finally:
        if not runner.is_rank:
            shutil.rmtree(directory, ignore_errors=True)
    failed = False
    for registration, outcomes in judged.items():
        print_table([(verdict.program, kind) for verdict, kind in outcomes])
        counts = Counter(kind for _, kind in outcomes)
        seconds = sum(verdict.seconds for verdict, _ in outcomes) / max(1, len(outcomes))
        places = Counter(place for verdict, kind in outcomes if kind == "hung" for place in verdict.where())
        print(
            f"\n{registration}: {len(outcomes)} runs: {counts['hung']} hung, {counts['crashed']} crashed, "
            f"{counts['wrong code']} with a wrong exit code, {counts[AS_PLAIN]} went wrong as plain DDP does; "
            f"{seconds:.2f} s each"
        )
        if places:
            print("hung in " + ", ".join(f"{place} ({count})" for place, count in places.most_common()))
        failed = failed or any(counts[kind] for kind in WRONG)
    return 1 if failed else 0


if __name__ == "__main__":
    # A rank returns to here, too; None ends it as a program ends whose last line was run.
    code = main()
    if code is not None:
        sys.exit(code)
