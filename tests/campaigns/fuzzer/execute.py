"""Runs a program on one rank: with plain DDP, which is recorded, and then with the hook, which is compared with it."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import operator
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import gpu
import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import register as register_hook

import ddp_hooks

from . import oracle
from .compare import copy_there, difference, digest, plain_copy
from .model import DTYPES, ROWS, TOKENS, WIDTH, Loose, Model, loss_of
from .odd import odd_gradient
from .program import Operation, Program, policy_of
from .units import nonzero_in_memory, parts_of, rows_of, unit_numbers, zero_units

Tensors = dict[str, torch.Tensor | None]
Register = Callable[[DistributedDataParallel, ddp_hooks.Policy, bool], ddp_hooks.SkipUnusedState]
PURPOSE = "raised on purpose"


@dataclass
class Trace:
    """What one run left behind on one rank; by the moment it was seen: the operation's number."""

    tensors: dict[str, Tensors] = field(default_factory=dict)
    # Plain DDP: the parameters that this rank accumulated a gradient for since the last pass that was reduced, and how
    # large its gradients were so far.
    used: dict[str, list[str]] = field(default_factory=dict)
    scales: dict[str, dict[str, float]] = field(default_factory=dict)
    # Plain DDP: which elements of the gradients were not zero when this rank put them into that pass, as packed bits in
    # the order of memory.
    nonzero: dict[str, dict[str, bytes]] = field(default_factory=dict)
    in_step: dict[str, bool] = field(default_factory=dict)
    # With the hook: bytes of that pass (payload, dense), and the policy in force.
    sent: dict[str, tuple[int, int]] = field(default_factory=dict)
    policies: dict[str, str | dict[str, Any]] = field(default_factory=dict)
    # The parameters that DDP did not know in that pass, and that may have travelled all the same.
    unmanaged: dict[str, list[str]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    # (Real) elements and rows of each parameter.
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)


def warm_up(rank: int) -> None:
    """Have everything imported that the first DDP module imports."""
    DistributedDataParallel(nn.Linear(1, 1))


class OracleFailed(Exception):
    """Plain DDP could not run the program, so it is no program to compare with."""


def run_program(rank: int, text: str, register: Register = register_hook) -> dict[str, Any]:
    """Run a program on this rank, and return what the ranks have to compare among each other."""
    program = Program.from_json(text)
    if program.options.hosts is not None:
        os.environ["DDP_HOOKS_HOST"] = program.options.hosts[rank]
    # So slow that it pays to code whatever saves a tenth.
    os.environ["DDP_HOOKS_LINK_MBITS"] = "100"
    if program.options.device == "pretend":
        from ddp_hooks_testing import _pretend

        _pretend.seed(1000 * program.seed + rank)
    if program.options.device == "cuda":
        gpu.prepare()
    with _filled_memory() if program.options.fills_memory else contextlib.nullcontext():
        return _run_both(program, rank, register)


def _run_both(program: Program, rank: int, register: Register) -> dict[str, Any]:
    try:
        plain = _Run(program, rank, None, register).run()
    except Exception as error:
        raise OracleFailed(str(error)) from error
    if dist.get_world_size() > 2:
        _share_scales(plain)
    ours = _Run(program, rank, plain, register).run()
    gc.collect()
    return {
        "differences": ours.differences,
        "plain": {moment: _digests(tensors) for moment, tensors in plain.tensors.items()},
        "ours": {moment: _digests(tensors) for moment, tensors in ours.tensors.items()},
        "used": plain.used,
        "nonzero": plain.nonzero,
        "sent": ours.sent,
        "policies": ours.policies,
        "unmanaged": ours.unmanaged,
        "counters": ours.counters,
        "sizes": ours.sizes,
        "shapes": ours.shapes,
    }


@contextlib.contextmanager
def _filled_memory() -> Iterator[None]:
    """Have torch.empty give the largest number, or NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=True)


def _digests(tensors: Tensors) -> dict[str, int]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def _share_scales(plain: Trace) -> None:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, plain.scales)
    for moment, scales in plain.scales.items():
        for theirs in everybody:
            # A rank that has joined is not there any more; what it put in before is in its last scales.
            for name, scale in theirs.get(moment, {}).items():
                scales[name] = max(scale, scales.get(name, 0.0))


class _Run:
    """One run of a program; `plain` is the recording to compare with, or None to make one."""

    def __init__(self, program: Program, rank: int, plain: Trace | None, register: Register) -> None:
        self.program, self.rank, self.plain = program, rank, plain
        self.options = program.options
        self.trace = Trace()
        self.own_options = oracle.own_options_will_do(program)
        self.idles = oracle.idleness_will_do(program)
        torch.manual_seed(program.seed)
        # What waits for the device comes last, so that the host may be a step ahead; but gradients are overwritten when
        # they have been compared, if the order of sums is free.
        self.looks_later = self.options.device != "cpu" and program.ranks <= 2
        self.later: list[Callable[[], None]] = []
        # The Reducer does after its first pass.
        self.makes_buckets_anew = True
        self.stream = None if self.options.streams == "default" else torch.Stream(device=self.options.device)
        with self._on_stream(self.options.streams != "trained"):
            if self.stream is not None:
                self.wrapped_on = torch.accelerator.current_stream()
            self._set_up(plain, register)

    @contextlib.contextmanager
    def _on_stream(self, own: bool) -> Iterator[None]:
        """Have what is done put on a stream of this run's own, if the program has one, and wait for it at the end."""
        if self.stream is None or not own:
            yield
            return
        callers = torch.accelerator.current_stream()
        self.stream.wait_stream(callers)
        with self.stream:
            yield
        callers.wait_stream(self.stream)

    def _drops_gradients(self) -> None:
        """Do as whoever drops gradients has to that were made on one stream and read on another."""
        if self.stream is not None:
            for parameter in self.named.values():
                if parameter.grad is not None:
                    parameter.grad.record_stream(torch.accelerator.current_stream())

    def _drops_buckets(self) -> None:
        """The same where the Reducer is about to drop its buckets; they are not ours to record."""
        if self.options.streams == "trained":
            self.wrapped_on.wait_stream(torch.accelerator.current_stream())

    def _set_up(self, plain: Trace | None, register: Register) -> None:
        program = self.program
        self.model = Model(program.layers, self.options.output).to(self.options.device)
        if self.options.streams == "layers":
            self.model.streams = {index: torch.Stream(device=self.options.device) for index in self.model.names}
        self.named = dict(self.model.named_parameters())
        self.trace.sizes = {name: p.numel() * p.element_size() for name, p in self.named.items()}
        self.trace.shapes = {name: (parts_of(p).numel(), rows_of(p)) for name, p in self.named.items()}
        self.largest: dict[str, float] = {}
        self.nonzero: dict[str, torch.Tensor] = {}
        # Elements of gradients whose zeros have got either sign; what is accumulated on top of them keeps it.
        self.free_signs: dict[str, torch.Tensor] = {}
        self.used: set[str] = set()
        self.policy = self.options.policy
        self.state: ddp_hooks.SkipUnusedState | None = None
        self.closed: list[ddp_hooks.SkipUnusedState] = []  # those before it
        self.register = register
        self.watching: dict[str, Any] = {}
        if plain is None:
            for name in self.named:
                self._watch(name)
        frozen = self._select(self.options.frozen_when_wrapped)
        settings: dict[str, Any] = {
            "find_unused_parameters": self.options.find_unused_parameters,
            "static_graph": self.options.static_graph,
            **(oracle.options_of_the_oracle(program) if plain is None else {}),
        }
        if plain is not None or self.own_options:
            self._require_gradients(frozen, False)
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
        if plain is not None and self.options.device == "pretend" and self.options.group == "host":
            settings["process_group"] = dist.new_group(backend="cpu:gloo,pretend:pretend_host")
        self.ddp = DistributedDataParallel(
            self.model,
            gradient_as_bucket_view=self.options.gradient_as_bucket_view,
            broadcast_buffers=self.options.broadcast_buffers,
            bucket_cap_mb=self.options.bucket_cap_mb,
            **settings,
        )
        self._require_gradients(frozen, False)
        if plain is not None:
            self.state = register(self.ddp, policy_of(self.policy), self.options.native)
        self.buffer_sync = (
            ddp_hooks.sync.BufferSync(self.ddp, self.options.buffer_sync)  # type: ignore[arg-type]
            if self.options.buffer_sync and self.options.broadcast_buffers and not self.options.join
            else None
        )
        self.optimizer = _optimizer(self.options.optimizer, self.model)

    def run(self) -> Trace:
        with self._on_stream(own=True):
            self._run()
        return self.trace

    def _run(self) -> None:
        options = self.options
        if options.join is None:
            self._operate()
        else:
            with self.ddp.join(divide_by_initial_world_size=options.divide_by_initial_world_size):
                self._operate()
        self._look("end")
        for wait_and_compare in self.later:
            wait_and_compare()
        if self.state is not None:
            self.trace.counters = {
                name: value
                for name, value in self._statistics().to_dict().items()
                if not name.endswith("_seconds") and name != "sent_bytes"  # each rank's own
            }
            self._check_statistics()
        if self.buffer_sync is not None:
            self.buffer_sync.remove()
        for handle in self.watching.values():
            handle.remove()

    def _operate(self) -> None:
        updates = 0
        within = False  # a step
        join = self.options.join
        for index, operation in enumerate(self.program.operations):
            do = operation["do"]
            within = do != "update" and (within or do == "pass")
            # Of what is collective besides DDP, ranks that run out of data do only this, while they are all there.
            all_rebuild = join is not None and do == "rebuild" and not within and updates <= min(join)
            if join is not None and updates >= join[self.rank] and not all_rebuild:
                if within or updates > min(join):
                    return
                continue
            updates += do == "update"
            if join is None or all_rebuild or do not in _COLLECTIVE:
                getattr(self, f"_do_{do}")(operation, f"{index}. {do}")

    # --- operations

    def _do_pass(self, operation: Operation, moment: str) -> None:
        before = None if self.state is None else self.state.stats()
        unmanaged = self._unmanaged()
        # What lay there before, from a pass that was not reduced, say, goes into this one.
        self.nonzero = {
            name: _nonzero(p) for name, p in self.named.items() if self.plain is None and p.grad is not None
        }
        with self._odd(operation), contextlib.nullcontext() if operation["sync"] else self.ddp.no_sync():
            self._loss(operation).backward()
        if not operation["sync"]:
            return
        if self.makes_buckets_anew:
            self._drops_buckets()
            self.makes_buckets_anew = False
        if self.state is not None and before is not None:
            after = self.state.stats()
            self.trace.sent[moment] = (
                after.payload_bytes - before.payload_bytes,
                after.dense_bytes - before.dense_bytes,
            )
            self.trace.policies[moment] = self.policy
            self.trace.unmanaged[moment] = unmanaged
        self.trace.used[moment] = sorted(self.used)
        self.trace.nonzero[moment] = {name: _packed(nonzero) for name, nonzero in self.nonzero.items()}
        self.used.clear()
        self._look(moment)

    def _unmanaged(self) -> list[str]:
        known = {id(p) for p in ddp_hooks._C.reducer_parameters(self.ddp.reducer)}
        return [name for name, p in self.named.items() if id(p) not in known]

    def _loss(self, operation: Operation) -> torch.Tensor:
        loss = torch.zeros((), device=self.options.device)
        for forward in range(operation.get("forwards", 1)):
            loss = loss + loss_of(self._forward(operation, forward))
        used = self._used_parameters(operation)
        if operation.get("penalty"):
            loss = loss + 0.01 * sum(_total(p.abs().square()) for p in used if self._dense(p))
        if operation.get("idle") and self.idles:
            loss = loss + 0 * sum(_total(p) for p in self.model.parameters() if self._dense(p))
        return loss

    def _dense(self, parameter: nn.Parameter) -> bool:
        """Say whether a loss may use a parameter directly: what has sparse gradients may not get a dense one."""
        sparse = (m.weight for m in self.model.modules() if isinstance(m, nn.Embedding) and m.sparse)
        return parameter.requires_grad and all(parameter is not weight for weight in sparse)

    def _forward(self, operation: Operation, forward: int = 0) -> Any:
        x, tokens = self._batch(operation["batch"] + forward)
        factors = {int(index): float(by_rank[self.rank]) for index, by_rank in operation.get("factors", {}).items()}
        used = operation["used"][self.rank]
        dtype = DTYPES.get(operation.get("autocast"))
        with self._declaring(operation), torch.autocast(self.options.device, dtype, enabled=dtype is not None):
            return self.ddp(x, tokens, used, factors)

    @contextlib.contextmanager
    def _odd(self, operation: Operation) -> Iterator[None]:
        """Have the gradients of this pass exchanged."""
        handles, layers = [], []
        for odd in operation.get("odd", ()):
            kind, parameter = odd["kinds"][self.rank], self.named.get(odd["on"])
            if kind is None or parameter is None or not self._dense(parameter):
                continue
            exchange = functools.partial(odd_gradient, odd=odd, kind=kind, seed=operation["batch"] + self.rank)
            layer = self.model.get_submodule(odd["on"].rpartition(".")[0])
            if odd["via"] == "function" and isinstance(layer, Loose):
                layer.exchange = exchange
                layers.append(layer)
            else:
                handles.append(parameter.register_hook(exchange))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for layer in layers:
                layer.exchange = None

    def _batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number * 1000 + self.rank)
        shared = torch.Generator().manual_seed(number)
        x = torch.randn(ROWS, WIDTH, generator=generator)
        own, common = (torch.randint(TOKENS, (ROWS, 2), generator=g) for g in (generator, shared))
        return x.to(self.options.device), torch.cat([own, common], 1).to(self.options.device)

    def _used_parameters(self, operation: Operation) -> list[nn.Parameter]:
        names = self.model.names
        layers = [self.model.layers[names[i]] for i in operation["used"][self.rank] if i in names]
        return list({id(p): p for layer in (*layers, self.model.head) for p in layer.parameters()}.values())

    def _declaring(self, operation: Operation) -> contextlib.AbstractContextManager[Any]:
        """Tell the state what is left out, if DDP does not search for it; sometimes if it does."""
        if self.state is None or self.ddp.static_graph or (operation.get("idle") and self.idles):
            return contextlib.nullcontext()
        declare = operation.get("declare")
        used = {id(p) for p in self._used_parameters(operation)}
        left_out = [p for p in self.model.parameters() if id(p) not in used and p.requires_grad]
        if self.ddp.find_unused_parameters:
            if operation.get("declare_used"):
                left_out = list(self.model.parameters())
            if not declare:
                return contextlib.nullcontext()
        if not left_out:
            return contextlib.nullcontext()
        if declare == "once":
            if operation["sync"]:
                self.state.declare_unused(*left_out)
            return contextlib.nullcontext()
        return self.state.unused(*left_out)

    def _do_fail(self, operation: Operation, moment: str) -> None:
        """Fail, as the next pass that is reduced, so that it is run again as it was."""
        later = self.program.operations[int(moment.split(".")[0]) :]
        attempt = next((other for other in later if other["do"] == "pass" and other["sync"]), None)
        if attempt is None:
            return
        output = self._forward(attempt)
        loss = loss_of(output)
        here = loss if operation["at"] == "loss" else _tensors(output)[0]
        here.register_hook(_raise)
        with pytest.raises(RuntimeError, match=PURPOSE):
            (loss * 1).backward()

    def _do_update(self, operation: Operation, moment: str) -> None:
        if operation.get("clip"):
            nn.utils.clip_grad_norm_(self.model.parameters(), operation["clip"])
        if not operation.get("skip"):
            self.optimizer.step()
        self._drops_gradients()
        if operation["zero"] != "keep":
            self._now_or_later(self.free_signs.clear)
            self.optimizer.zero_grad(set_to_none=operation["zero"] == "none")
        self._look(moment)

    def _do_freeze(self, operation: Operation, moment: str) -> None:
        names = self._select(operation["what"][self.rank])
        self._drops_gradients()
        if operation["how"] == "flag" or not names:
            self._require_gradients(names, False)
        else:
            ddp_hooks.freeze(self.ddp, *names, keep_gradients=operation.get("keep", False))

    def _do_unfreeze(self, operation: Operation, moment: str) -> None:
        names = self._select(operation["what"][self.rank])
        if operation["how"] == "flag" or not names:
            self._require_gradients(names, True)
        else:
            ddp_hooks.unfreeze(self.ddp, *names)

    def _do_hook(self, operation: Operation, moment: str) -> None:
        factor = operation["multipliers"][self.rank]
        if operation["kind"] == "forward":
            self.ddp.register_forward_hook(lambda module, args, output: _scaled(output, factor))
        parameter = self.named.get(operation.get("on", ""))
        if parameter is None or not parameter.requires_grad:
            return
        if operation["kind"] == "tensor":
            parameter.register_hook(lambda gradient: gradient * factor)
        else:
            parameter.register_post_accumulate_grad_hook(lambda p: _scale_gradient(p, factor))
            if self.plain is None:
                # What is reduced is what the last of such hooks leaves.
                self._watch(operation["on"])

    def _do_policy(self, operation: Operation, moment: str) -> None:
        if self.state is not None:
            self.policy = operation["policy"]
            self.state.set_policy(policy_of(self.policy))

    def _do_rebuild(self, operation: Operation, moment: str) -> None:
        if self.state is not None:
            self._drops_buckets()
            self.makes_buckets_anew = True
            ddp_hooks.rebuild(self.ddp, find_unused_parameters=operation.get("search"))

    def _do_broadcast(self, operation: Operation, moment: str) -> None:
        ddp_hooks.sync.broadcast_parameters(self.ddp, operation["src"])
        self._look(moment)

    def _do_average(self, operation: Operation, moment: str) -> None:
        ddp_hooks.sync.average_parameters(self.ddp, weights=operation.get("weights"), buffers=operation["buffers"])
        self._look(moment)

    def _do_verify(self, operation: Operation, moment: str) -> None:
        sparse = any(p.grad is not None and p.grad.is_sparse for p in self.model.parameters())
        report = ddp_hooks.sync.verify_replicas(
            self.ddp, gradients=not sparse, optimizer=self.optimizer if operation["optimizer"] else None
        )
        self.trace.in_step[moment] = report.in_step

    def _do_checkpoint(self, operation: Operation, moment: str) -> None:
        if self.state is None:
            return
        before = self.state.stats()
        if operation["how"] == "pickle":
            copied = pickle.loads(pickle.dumps(self.state))
            assert (copied.stats(), copied.policy.to_dict()) == (before, self.state.policy.to_dict())
        else:
            self.state.load_state_dict(json.loads(json.dumps(self.state.state_dict())))
            assert self.state.stats() == before

    def _do_register(self, operation: Operation, moment: str) -> None:
        if self.state is not None:
            self.state.close()
            self.closed.append(self.state)
            self.state = self.register(self.ddp, policy_of(self.policy), self.options.native)

    def _do_evaluate(self, operation: Operation, moment: str) -> None:
        x, tokens = self._batch(operation["batch"])
        self.ddp.eval()
        with torch.no_grad():
            self.ddp(x, tokens, [layer["id"] for layer in self.program.layers], {})
        self.ddp.train()

    # --- looking

    def _watch(self, name: str) -> None:
        def note(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self.used.add(name)
                self.nonzero[name] = _nonzero(parameter)
                values = plain_copy(parameter.grad).double().abs()
                largest = float(values[values.isfinite()].max()) if bool(values.isfinite().any()) else 0.0
                self.largest[name] = max(largest, self.largest.get(name, 0.0))

        if name in self.watching:
            self.watching[name].remove()
        # To be removed: Python's collector does not see cycles that lead through such hooks.
        self.watching[name] = self.named[name].register_post_accumulate_grad_hook(note)

    def _look(self, moment: str) -> None:
        copy = copy_there if self.looks_later else plain_copy
        tensors: Tensors = {}
        for name, parameter in self.named.items():
            tensors[f"gradient of {name}"] = None if parameter.grad is None else copy(parameter.grad)
            tensors[f"weight {name}"] = copy(parameter)
        for name, buffer in self.model.named_buffers():
            tensors[f"buffer {name}"] = copy(buffer)
        self.trace.scales[moment] = dict(self.largest)
        self._now_or_later(functools.partial(self._compare, moment, tensors, policy_of(self.policy)))

    def _now_or_later(self, act: Callable[[], None]) -> None:
        if self.looks_later:
            self.later.append(act)
        else:
            act()

    def _compare(self, moment: str, tensors: Tensors, policy: ddp_hooks.Policy) -> None:
        plain = self.plain
        tensors = {what: None if tensor is None else tensor.cpu() for what, tensor in tensors.items()}
        self.trace.tensors[moment] = tensors
        if plain is None:
            return
        exact = self.program.ranks <= 2
        for what, ours in tensors.items():
            theirs = plain.tensors[moment][what]
            gradient = what.startswith("gradient of ")
            scale = None
            if gradient and not exact:
                scale = plain.scales[moment].get(what.removeprefix("gradient of "), 0.0)
            zero_signs: bool | torch.Tensor = not gradient
            if gradient and ours is not None and theirs is not None and ours.shape == theirs.shape:
                zero_signs = self._free_signs(what.removeprefix("gradient of "), ours, theirs, policy)
            used = what.removeprefix("gradient of ") in self.trace.used.get(moment, ())
            left_over = gradient and self.program.options.gradient_as_bucket_view and not used
            found = difference(ours, theirs, scale=scale, zero_signs=zero_signs, left_over=left_over)
            if found is not None:
                self.trace.differences.append(f"rank {self.rank}, after {moment}: {what} {found}")
        if self.trace.in_step != {m: v for m, v in plain.in_step.items() if m in self.trace.in_step}:
            self.trace.differences.append(f"rank {self.rank}, after {moment}: replicas are in step in one run only")
        if not exact:
            for name, parameter in self.named.items():
                theirs = plain.tensors[moment][f"gradient of {name}"]
                if parameter.grad is not None and theirs is not None:
                    _overwrite(parameter, theirs)

    def _free_signs(
        self, name: str, ours: torch.Tensor, theirs: torch.Tensor, policy: ddp_hooks.Policy
    ) -> bool | torch.Tensor:
        parameter = self.named[name]
        # Scaled part by part, not as complex numbers.
        if parameter.is_complex():
            return True
        numbers = unit_numbers(parameter, policy)
        if numbers is not None:
            # What one rank alone contributes is added to +0.0, also where another one has -0.0 and nothing else.
            zeros = (
                torch.ones_like(numbers, dtype=torch.bool)
                if policy.tuning.direct
                else zero_units(numbers, ours, theirs)
            )
            self.free_signs[name] = zeros | self.free_signs.get(name, zeros)
        return self.free_signs.get(name, False)

    def _statistics(self) -> ddp_hooks.statistics.Statistics:
        states = [*self.closed, *([] if self.state is None else [self.state])]
        return functools.reduce(operator.add, (state.stats() for state in states))

    def _check_statistics(self) -> None:
        statistics = self._statistics()
        assert statistics.saved_fraction <= 1, statistics
        reduced = sum(operation["do"] == "pass" and operation["sync"] for operation in self.program.operations)
        if self.options.join is None:
            assert statistics.steps == reduced, f"{statistics.steps} steps in {reduced} passes that were reduced"

    # --- names

    def _select(self, patterns: list[str]) -> list[str]:
        return [
            name
            for name in self.named
            if any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in patterns)
        ]

    def _require_gradients(self, names: list[str], required: bool) -> None:
        for name in names:
            self.named[name].requires_grad_(required)


_COLLECTIVE = ("policy", "register", "rebuild", "broadcast", "average", "verify", "checkpoint", "fail")


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    if name == "momentum":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05)


def _nonzero(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return nonzero_in_memory(parameter, gradient.to_dense() if gradient.is_sparse else gradient)


def _packed(nonzero: torch.Tensor) -> bytes:
    return numpy.packbits(nonzero.numpy()).tobytes()


def _overwrite(parameter: nn.Parameter, values: torch.Tensor) -> None:
    assert parameter.grad is not None
    if parameter.grad.is_sparse:
        parameter.grad = values.to_sparse(1)
    else:
        (torch.view_as_real(parameter.grad) if parameter.grad.is_complex() else parameter.grad).copy_(values)


def _scale_gradient(parameter: torch.Tensor, factor: float) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(factor)


def _total(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.sum()
    return (total.real if total.is_complex() else total).float()


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, dict):
        return [output["a"], *output["rest"]]
    return list(output) if isinstance(output, tuple) else [output]


def _scaled(output: Any, factor: float) -> Any:
    if isinstance(output, dict):
        return {"a": output["a"] * factor, "rest": [part * factor for part in output["rest"]]}
    return tuple(part * factor for part in output) if isinstance(output, tuple) else output * factor


def _raise(gradient: torch.Tensor) -> torch.Tensor:
    raise RuntimeError(PURPOSE)
