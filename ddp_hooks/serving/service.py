"""Serves one DDP module with an engine, control groups, and hooks on its forward pass."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from .. import _extension
from ..hangs import watcher
from ..hangs.activity import ModuleActivity, activity
from ..policies import Policy
from ..statistics import ParameterUsage, Statistics, UnitUsage
from ..wording import short, short_list
from .absentees import meet_to_close
from .agreement import propose, settle
from .control_groups import ControlGroups, new_name, timeout_of
from .engine_settings import engine_settings, why_little_is_coded, why_nothing_is_coded
from .groups import is_in_use
from .hosts_on_streams import with_hosts_on_streams
from .modules import (
    describe,
    initialize_used_map,
    parameters_of,
    rebuild_reducer,
    reducible_parameters,
    why_not_coded,
)
from .parameters import ParameterIndex, ParameterPlaces, Selector
from .topology import Topology

_C = _extension.load()

# The current or last service of each module.
_services: weakref.WeakKeyDictionary[DistributedDataParallel, weakref.ref[Service]] = weakref.WeakKeyDictionary()
# For each module whose hook was removed: the number of forward passes of its Reducer at that time, and the parameters,
# by identity, with an accumulated gradient that no step had reduced. The next service needs them if it serves the next
# step.
_left_over: weakref.WeakKeyDictionary[DistributedDataParallel, tuple[int, frozenset[int]]] = weakref.WeakKeyDictionary()
# In a forked child: the parent's engines, groups and parts of DDP, which must never be destroyed here.
_of_the_parent: list[object] = []
# A name in the description that ranks compare when they register.
REGISTERED = "hook of this package registered before"
# A replaced parameter is noticed after at most this many steps.
_STEPS_BETWEEN_LOOKS = 16
# How long closing a service waits for its groups' threads and files to go. If an exchange is under way, they go later,
# in the background.
_CLOSING_SECONDS = 0.5


class _HookActivity:
    """Lets another thread ask the current engine of a service, without keeping either alive."""

    def __init__(self, service: Service) -> None:
        self._service = weakref.ref(service)

    def seconds_in_hook(self) -> float:
        engine = self._engine()
        return 0.0 if engine is None else float(engine.seconds_in_hook())

    def agreed_steps(self) -> int:
        engine = self._engine()
        return 0 if engine is None else int(engine.agreed_steps())

    def _engine(self) -> Any:
        service = self._service()
        return None if service is None else service.engine


class Service:
    """Serves one DDP module until it is closed, the module goes, or another service takes the module over.

    The module's hooks and the state hold the service; it holds neither.

    Args:
        ddp: the module. Its previous service is closed.
        policy: the policy, the same on every rank.
        groups: the module's control groups.
        hook: the function that DDP calls, or would call, with ``state``.
        state: the state that the hook is registered with.
        native: let the Reducer call the engine itself, and note the hook as DDP would.

    Attributes:
        engine: a ``_C.Engine``; None once the service has ended.
        state: a weak reference to the state.
    """

    # Copying or unpickling a module copies the hooks on its forward pass, but the copies serve nothing.
    engine: Any = None
    # Why the service has ended, as a clause about the state.
    ended = "whose module no longer exists"

    def __init__(
        self,
        ddp: DistributedDataParallel,
        policy: Policy,
        groups: ControlGroups,
        *,
        hook: Callable[..., Any],
        state: object,
        native: bool,
    ) -> None:
        before = _services.get(ddp)
        if before is not None and (other := before()) is not None:
            other.close("whose module another state now serves")
        self.state = weakref.ref(state)
        self._hook = hook
        self._control_groups: ControlGroups | None = groups
        # For closing, when the module may be gone on some ranks.
        self._group, self._name = weakref.ref(ddp.process_group), groups.name
        self._timeout_seconds = timeout_of(ddp).total_seconds()
        self._is_closed = False
        self._policy = policy
        self._why_uncoded = ""  # whatever the gradients' values
        self._native = native
        self._ddp: weakref.ref[DistributedDataParallel] | None = weakref.ref(ddp)
        self._earlier = Statistics()  # of earlier engines and earlier policies
        self._accumulated_steps = 0  # since then; see `Statistics`
        self._unsynchronised = False  # whether the last forward pass was under `no_sync`
        self._last_usage: dict[str, ParameterUsage] = {}  # of the earlier engine, until this one has had a step
        # The module's parameters in the engine's order: those of DDP's Reducer, then those that it does not know.
        self._parameters: list[torch.Tensor] = []
        self._names: list[str] = []
        self._places: dict[str, int] = {}  # by name
        self._index: ParameterIndex | None = None
        self._parameter_places: ParameterPlaces | None = None
        self._replaced: set[str] = set()  # those that a warning has named
        # Of every parameter that the module's Reducers had while it was served, by name. Bytes.
        self._reduced_bytes: dict[str, int] = {}
        self._bytes_now = 0  # of the parameters in the current Reducer
        self._declared: list[set[str]] = []  # one set for each open `unused` block
        self._declared_once: set[str] = set()  # for the next forward pass
        self._declared_now: set[str] = set()  # for the forward pass that has begun
        self._finalizer: Any = None  # closes when the module goes
        self._activity = ModuleActivity(
            type(ddp.module).__name__, dist.get_process_group_ranks(ddp.process_group), _HookActivity(self)
        )
        initialize_used_map(ddp)
        passes, pending = _left_over.pop(ddp, (None, frozenset()))
        self._start_engine(ddp, pending if passes == _C.reducer_forward_passes(ddp.reducer) else frozenset())
        self._handles = [
            ddp.register_forward_pre_hook(self._forward_begins),
            ddp.register_forward_hook(self._forward_done),
        ]
        _services[ddp] = weakref.ref(self)
        activity.add(self._activity)
        watcher.begin(policy.tuning.report_hang_after)
        self._warn_of_uncoded_gradients(ddp, 5)
        if native:
            # As DDP does for a hook that is registered through it.
            ddp._comm_hooks.append((hook, state))
            if ddp.logger is not None:
                ddp.logger._set_comm_hook_name(hook.__qualname__)

    def __getstate__(self) -> dict[str, Any]:
        """Copy nothing; see `engine`."""
        return {}

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The module; None if it is gone or the service has ended."""
        return None if self._ddp is None else self._ddp()

    def is_registered(self) -> bool:
        """Say whether the hook itself, not one that wraps it, is registered with DDP and this service's state."""
        return any(hook is self._hook for hook, _ in self._entries())

    def _entries(self) -> list[tuple[Callable[..., Any], object]]:
        """Return the hooks that DDP has noted with this service's state."""
        ddp, own = self.ddp, self.state()
        if ddp is None or own is None:
            return []
        return [(hook, state) for hook, state in getattr(ddp, "_comm_hooks", ()) if state is own]

    def agree_to_close(self) -> None:
        """Make sure that every rank closes; errors as for :func:`absentees.meet_to_close`.

        Does nothing if it is closed, or if its process group was destroyed and no rank can be asked.
        """
        group, ddp = self._group(), self.ddp
        if self._is_closed or group is None or not is_in_use(group):
            return
        problem = None
        # Reads without a lock, because DDP holds its lock while it calls a hook that wraps this one.
        if ddp is not None and self.engine is not None and _C.reducer_is_in_backward(ddp.reducer):
            problem = "a backward pass is under way; call close between two steps"
        meet_to_close(group, self._name, problem, self._timeout_seconds)

    def close(self, why: str = "that was closed") -> None:
        """Remove the hook from the module, which then trains as plain DDP, and close the groups. May be called again.

        Asks no other rank.

        Args:
            why: why the service has ended, as a clause about the state.

        Raises:
            RuntimeError: a backward pass is under way.
        """
        ddp = self.ddp
        if ddp is not None and _C.reducer_is_in_backward(ddp.reducer):
            raise RuntimeError(
                "ddp_hooks: expected the state to be closed between two steps, received a call during a backward pass"
            )
        self._is_closed = True
        if self.engine is None:
            return
        entries, pending = self._entries(), self._pending()
        self.engine.close(remove_hook=bool(entries), dying=False)
        if entries:
            served, own = self._served(), self.state()
            served._comm_hooks = [(hook, state) for hook, state in served._comm_hooks if state is not own]
        if pending and ddp is not None:
            _left_over[ddp] = _C.reducer_forward_passes(ddp.reducer), pending
        self.ended = why
        self._leave_module()
        _C.wait_until_groups_are_gone(_CLOSING_SECONDS)

    def leave_to_parent(self) -> None:
        """End the service in a forked child.

        Locks of the engine and of DDP may be held, by threads that do not exist in the child. So the engine is never
        called or destroyed from now on.
        """
        ddp = self.ddp
        parts = () if ddp is None else (ddp.reducer, ddp.logger)
        _of_the_parent.append((self.engine, self._control_groups, *parts))
        if activity.forked_by_trainer:
            self._earlier = self.statistics()
        self._finalizer.detach()
        self.engine = self._control_groups = self._ddp = None
        self._is_closed = True  # only the parent may agree with other ranks
        self.ended = "of the process that this one was forked from"

    def _leave_module(self) -> None:
        self._earlier = self.statistics()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        activity.remove(self._activity)
        self._finalizer.detach()
        self.engine = None
        self._control_groups = None
        # The state may live on for its statistics, and must not keep the parameters alive.
        self._parameters, self._index, self._parameter_places = [], None, None
        self._names, self._places, self._reduced_bytes = [], {}, {}
        self._ddp = None

    # --- engines

    def _pending(self) -> frozenset[int]:
        """Return the parameters, by identity, with an accumulated gradient that no step has reduced."""
        return frozenset(id(self._parameters[i]) for i in self.engine.pending())

    def _start_engine(self, ddp: DistributedDataParallel, pending: Set[int]) -> None:
        self.engine = self._make_engine(ddp, pending)
        if self._native:
            self.engine.register_natively()
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(ddp, _module_is_gone, self.engine, weakref.ref(self), self._activity)
        self._finalizer.atexit = False

    def _make_engine(self, ddp: DistributedDataParallel, pending: Set[int]) -> Any:
        reduced, unmanaged = parameters_of(ddp)
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        self._parameters = [*reduced, *unmanaged]
        self._names = [names.get(id(parameter), f"#{i}") for i, parameter in enumerate(self._parameters)]
        self._places = {name: place for place, name in enumerate(self._names)}
        self._index = ParameterIndex(ddp.module)
        self._parameter_places = ParameterPlaces(ddp.module)
        sizes = {self._names[i]: parameter.numel() * parameter.element_size() for i, parameter in enumerate(reduced)}
        self._reduced_bytes |= sizes
        self._bytes_now = sum(sizes.values())
        self._note_coding(ddp)
        assert self._control_groups is not None
        engine = _C.Engine(
            reducer=ddp.reducer,
            control_groups=self._control_groups.groups,
            **self._settings(self._policy, describe(self._policy, ddp, reduced, unmanaged)),
            unmanaged_parameters=unmanaged,
            names=self._names,
            pending=[i for i, parameter in enumerate(self._parameters) if id(parameter) in pending],
        )
        # A weak reference, because Python's collector does not see cycles through the engine.
        service = weakref.ref(self)

        def rebuild_module() -> None:
            living = service()
            if living is not None and living.ddp is not None:
                living.rebuild(None)

        engine.set_callbacks(
            rebuild=rebuild_module,
            tell_unregistered=_warn_of_a_missing_hook,
            explain=partial(_explain, self._activity),
        )
        return engine

    def _settings(self, policy: Policy, description: Mapping[str, str]) -> dict[str, Any]:
        """Return what the engine is told of a policy."""
        groups = self._control_groups
        assert groups is not None
        topology = groups.topology.under(policy)
        return {
            "settings": engine_settings(policy, description, topology),
            "hosts": groups.on_streams if topology.adds_up_in_hosts else None,
        }

    def rebuild(self, find_unused_parameters: bool | None) -> bool:
        """Rebuild the module's Reducer; arguments and errors as for :func:`ddp_hooks.rebuild`."""
        ddp = self._served()
        trainable_here = sorted(
            name for name, parameter in reducible_parameters(ddp).items() if parameter.requires_grad
        )
        search = ddp.find_unused_parameters if find_unused_parameters is None else find_unused_parameters
        problem: str | None = None
        error: Exception | None = None
        if not isinstance(search, bool):
            error = TypeError(f"expected find_unused_parameters to be True, False or None, received {short(search)}")
            problem = str(error)
        elif _C.reducer_is_in_backward(ddp.reducer):
            problem = "a backward pass is under way; call rebuild between two steps"
        elif self.engine.awaits_backward():
            problem = (
                "a forward pass still awaits its backward pass, of which the new Reducer would not know; run that "
                "first, drop the outputs, or run such forward passes under torch.no_grad()"
            )
        description = {"find_unused_parameters": short(search)}
        trainable = set().union(*self._agree_between_steps("rebuild", description, problem, trainable_here, error))
        if not trainable:
            raise RuntimeError(
                "rebuild: expected a parameter that requires a gradient, received a module that is frozen on every "
                "rank, for which DDP has nothing to do"
            )
        pending = self._pending()
        if not rebuild_reducer(ddp, trainable, search):
            return False
        # The new Reducer gets a new engine, with the same groups and the statistics so far.
        self._last_usage = self.usage()
        self._restart_counters(self.statistics())
        self.engine.close(remove_hook=False, dying=True)
        self._start_engine(ddp, pending)
        if not self._native:
            # The hook that DDP has noted, which may wrap this one and have a state of its own.
            hook, state = (self._entries() or ddp._comm_hooks or [(self._hook, self.state())])[0]
            dist._register_comm_hook(ddp.reducer, state, hook)  # type: ignore[attr-defined]
        self._declare()
        return True

    # --- agreement between steps

    def register_again(self, policy: Policy, problem: str | None) -> None:
        """Make sure that every rank registers its hook again, with the policy in force.

        Raises:
            RefusedError: on every rank, if some rank asks for another policy, or had no hook registered.
        """
        ddp = self._served()
        if problem is None and policy != self._policy:
            # By name, if the names differ.
            there, asked = self._policy, policy
            shown = (there.name, asked.name) if there.name != asked.name else (there, asked)
            problem = (
                f"expected the policy that the module's hook already has ({shown[0]!r}), received {shown[1]!r}; call "
                "state.set_policy() on every rank to change it, or state.close() first (ddp_hooks.states() returns "
                "it)"
            )
        description = {REGISTERED: "yes", **describe(policy, ddp, *parameters_of(ddp))}
        settle("register", propose(ddp, "register", description, problem, ("", ())))

    def change_policy(self, policy: Policy, problem: str | None) -> None:
        """Change the policy. Every rank calls it.

        Raises:
            RefusedError: on every rank, if ranks differ or a backward pass is under way.
        """
        ddp = self._served()
        if problem is None and _C.reducer_is_in_backward(ddp.reducer):
            problem = "a backward pass is under way; call set_policy between two steps"
        problem = problem or why_not_coded(policy, ddp)
        description = describe(policy, ddp, *parameters_of(ddp))
        names = self._agree_between_steps("set_policy", description, problem, new_name())
        assert self._control_groups is not None
        self._control_groups = with_hosts_on_streams(ddp, "set_policy", names[0], self._control_groups, policy)
        self._restart_counters(self.statistics())  # some of them count per policy
        self.engine.configure(**self._settings(policy, description))
        self._policy = policy
        self._note_coding(ddp)
        self._warn_of_uncoded_gradients(ddp, 3)
        watcher.begin(policy.tuning.report_hang_after)

    def _agree_between_steps(
        self,
        function: str,
        description: Mapping[str, str],
        problem: str | None,
        own: object = None,
        error: Exception | None = None,
    ) -> list[Any]:
        """Agree, and finish exchanges that failed passes may have left on the control groups of some ranks."""
        proposals = propose(self._served(), function, description, problem, (self.engine.exchanges_started(), own))
        agreed = settle(function, proposals, error)
        # Takes the Reducer's lock, which DDP holds while it calls a hook that calls this; but then it was refused.
        self.engine.finish_exchanges(max(started for started, _ in agreed))
        return [theirs for _, theirs in agreed]

    def _served(self) -> DistributedDataParallel:
        ddp = self.ddp
        assert ddp is not None  # the callers make sure of it
        return ddp

    # --- forward passes

    def _is_watched(self, module: torch.nn.Module) -> bool:
        # A compiled graph has no hooks on outputs, so the exchange starts with the first bucket. Without a registered
        # hook, nothing would finish the exchange.
        if self.engine is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return False
        return bool(module._comm_hooks)

    def _forward_begins(self, module: torch.nn.Module, args: Any) -> None:
        if self.engine is not None and not torch.compiler.is_compiling():
            self._activity.passes += 1
        if not self._is_watched(module):
            return
        self.engine.forward_begins()
        if not module.require_backward_grad_sync:
            self._unsynchronised = True
            return
        if self._unsynchronised:
            self._unsynchronised = False
            # A pass for evaluation, for example, leaves no gradient.
            self._accumulated_steps += bool(self.engine.pending())
        if self._activity.steps % _STEPS_BETWEEN_LOOKS == 0:
            self._look_for_replaced_parameters()
        self._activity.steps += 1
        # Drops declarations for an earlier forward pass that raised.
        if self._declared_now or self._declared_once:
            self._declared_now, self._declared_once = self._declared_once, set()
            self._declare()

    def _look_for_replaced_parameters(self) -> None:
        ddp = self._served()
        if self._parameter_places is None or self._parameter_places.are_unchanged():
            return
        self._parameter_places = ParameterPlaces(ddp.module)
        known = {id(parameter) for parameter in self._parameters}
        new = {
            name
            for name, parameter in reducible_parameters(ddp).items()
            # Not tensors that torch.func.functional_call() puts there for one pass.
            if isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad and id(parameter) not in known
        }
        if new - self._replaced:
            self._replaced |= new
            warnings.warn(
                f"ddp_hooks: {short_list(sorted(new))} {'was' if len(new) == 1 else 'were'} put into the model after "
                "it was registered, by a new submodule or load_state_dict(assign=True) for instance. DDP holds the old "
                "parameters, and nothing averages the new ones: each rank trains its own. Wrap the model in "
                "DistributedDataParallel again after replacing parameters, register again, and give the optimizer the "
                "new parameters",
                stacklevel=4,
            )

    def _forward_done(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not self._is_watched(module):
            return
        synchronises = module.require_backward_grad_sync
        outputs = list(_find_tensors(output)) if synchronises else []  # type: ignore[no-untyped-call]
        self.engine.forward_done(outputs, synchronises)
        if synchronises and self._declared_now:
            self._declared_now = set()
            self._declare()

    @contextmanager
    def unused(self, *what: Selector) -> Iterator[None]:
        """Declare that forward passes in this block do not use some parameters."""
        names = self._names_of("unused", what)
        self._declared.append(names)
        self._declare()
        try:
            yield
        finally:
            self._declared.remove(names)
            self._declare()

    def declare_unused(self, *what: Selector) -> None:
        """Declare that the next synchronised forward pass does not use some parameters."""
        self._declared_once |= self._names_of("declare_unused", what)

    def _names_of(self, function: str, what: tuple[Selector, ...]) -> set[str]:
        assert self._index is not None
        return set(self._index.select(function, *what))

    def _declare(self) -> None:
        if self.engine is None:
            return  # closed within the block
        declared = self._declared_now.union(*self._declared)
        self.engine.declare_unused([self._places[name] for name in declared if name in self._places])

    # --- statistics

    def statistics(self) -> Statistics:
        """Return the counters since the module is served. They stay when the service ends."""
        if self.engine is None:
            return self._earlier
        removed = sum(self._reduced_bytes.values()) - self._bytes_now
        counted = Statistics.read(
            self.engine.statistics(), self._bytes_now, removed, accumulated_steps=self._accumulated_steps
        )
        why = self._why_uncoded or why_little_is_coded(self._policy, counted)
        return self._earlier + replace(counted, why_uncoded=why)

    @property
    def topology(self) -> Topology | None:
        """Which ranks share a host, and how gradients travel between hosts under the policy in force."""
        return None if self._control_groups is None else self._control_groups.topology.under(self._policy)

    def reset_statistics(self) -> None:
        """Set all counters to zero."""
        self._restart_counters(Statistics())

    def _restart_counters(self, earlier: Statistics) -> None:
        self._earlier, self._accumulated_steps = earlier, 0
        if self.engine is not None:
            self.engine.reset_statistics()

    def _note_coding(self, ddp: DistributedDataParallel) -> None:
        topology = self.topology
        assert topology is not None
        reduced, _ = parameters_of(ddp)
        self._why_uncoded = why_nothing_is_coded(self._policy, topology, ddp.process_group, ddp.device, reduced)

    def _warn_of_uncoded_gradients(self, ddp: DistributedDataParallel, stacklevel: int) -> None:
        if self._policy.coded == "on" and self._why_uncoded and dist.get_rank(ddp.process_group) == 0:
            warnings.warn(
                f"ddp_hooks: coded='on' does nothing, because {self._why_uncoded}; gradients are sent as they are",
                stacklevel=stacklevel + 1,
            )

    def usage(self) -> dict[str, ParameterUsage]:
        """Return how each parameter was used in the last step, by name, in DDP's order; empty before the first step."""
        here, anywhere, units, who = self.engine.usage()
        if len(here) == 0:
            return dict(self._last_usage)
        used_here, used_anywhere = set(here.indices()), set(anywhere.indices())
        counts = {
            parameter: UnitUsage(count, used, anywhere, tuple(by_rank) or None)
            for parameter, count, used, anywhere, by_rank in units
        }
        return {
            name: ParameterUsage(
                name,
                parameter.numel(),
                i in used_here,
                i in used_anywhere,
                not parameter.requires_grad,
                counts.get(i),
                _ranks_of(*who[i]) if who else None,
            )
            for i, (name, parameter) in enumerate(zip(self._names, self._parameters, strict=True))
        }


def _warn_of_a_missing_hook() -> None:
    # The level of the caller of `backward`, above three functions of torch.
    warnings.warn(
        "ddp_hooks: a SkipUnusedState was made for this module, but its gradients were reduced without a communication "
        "hook, as in plain DistributedDataParallel; call ddp.register_comm_hook(state, ddp_hooks.skip_unused_hook), "
        "or make the state with ddp_hooks.register(ddp), which also registers it",
        stacklevel=5,
    )


def _explain(activity: ModuleActivity, error: str) -> str:
    """Name the missing ranks, which an error of the mask exchange does not."""
    return watcher.explain_backward(activity, error) if watcher.waited_in_vain(RuntimeError(error)) else ""


def _ranks_of(count: int, ranks: int) -> tuple[int, ...] | None:
    found = tuple(rank for rank in range(ranks.bit_length()) if ranks >> rank & 1)
    return found if len(found) == count else None


def registered_service(ddp: DistributedDataParallel) -> Service | None:
    """Return the service of a module whose hook is registered with DDP; otherwise None."""
    service = _service_of(ddp)
    return service if service is not None and service.is_registered() else None


def _service_of(ddp: DistributedDataParallel) -> Service | None:
    reference = _services.get(ddp)
    return None if reference is None else reference()


def is_served(ddp: DistributedDataParallel) -> bool:
    """Say whether a state serves the module, even if its hook is not registered yet."""
    service = _service_of(ddp)
    return service is not None and service.engine is not None


def rebuild(ddp: DistributedDataParallel, find_unused_parameters: bool | None = None) -> bool:
    """Rebuild the Reducer of a module with a hook; arguments and errors as for :func:`ddp_hooks.rebuild`."""
    service = _service_of(ddp)
    # If a hook wraps ours and has a state of its own, DDP knows only that state.
    if service is None or not ddp._comm_hooks:
        raise RuntimeError(
            "rebuild: expected a module with a hook of this package, received one without; call "
            "ddp_hooks.register(ddp) first"
        )
    return service.rebuild(find_unused_parameters)


def _module_is_gone(engine: Any, service: weakref.ref[Service], module: ModuleActivity) -> None:
    living = service()
    if living is None:
        # The service went with the module, in one cycle, and could not remove its entry.
        activity.remove(module)
    elif living.engine is engine:
        living._leave_module()
    engine.close(remove_hook=False, dying=True)
    del engine
    _C.wait_until_groups_are_gone(_CLOSING_SECONDS)


def groups_to_share(ddp: DistributedDataParallel) -> dict[str, ControlGroups]:
    """Find groups of services for earlier wrappers of the same model, over the same ranks."""
    found = {}
    for other, reference in list(_services.items()):
        service = reference()
        if service is None or service._control_groups is None or other is ddp:
            continue
        # Not after a move to another device, which may need other groups.
        alike = other.module is ddp.module and other.process_group is ddp.process_group and other.device == ddp.device
        groups = service._control_groups
        is_free = groups.has_one_axis and not service.engine.has_early_exchange() and not groups.groups.have_failed()
        if alike and is_free:
            found[groups.name] = groups
    return found


def _leave_to_parent() -> None:
    for reference in list(_services.values()):
        service = reference()
        if service is not None and service.engine is not None:
            service.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
