"""The hook, its state, and the ways to register it.

There is no ``from __future__ import annotations`` here: DDP compares the annotations of a hook as objects.
"""

import atexit
import hashlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from . import _extension
from .agreement import settle
from .control_groups import ControlGroups, new_name, open_control_groups
from .parameters import ParameterIndex, Selector
from .policies import PRESETS, Policy, resolve
from .registration import describe, find_ddp, propose, why_unsupported
from .statistics import ParameterUsage, Statistics
from .wording import check_fields, short

_C = _extension.load()

_VALUES_DETECTOR = {
    "off": _C.ValuesDetector.OFF,
    "on": _C.ValuesDetector.ON,
    "adaptive": _C.ValuesDetector.ADAPTIVE,
}
# The state that each module was given last; a module has one at most.
_serving: weakref.WeakKeyDictionary[DistributedDataParallel, "weakref.ref[SkipUnusedState]"] = (
    weakref.WeakKeyDictionary()
)
# A guess until it is measured on a GPU: a quarter of the bytes for a host that no longer runs ahead.
_MIN_ZERO_FRACTION_ON_DEVICE = 0.25
# What else the ranks have to have in common when they register.
_REGISTERED = "hook of this package registered before"
# How long whoever closes a state waits for its groups' threads and files to be gone. Longer only where an exchange is
# under way, which then ends in the background.
_CLOSING_SECONDS = 0.5


@atexit.register
def _keep_groups() -> None:
    # Groups that close while the interpreter is being taken down would wait for threads that cannot end any more.
    _C.keep_groups_from_now_on()
    _C.wait_until_groups_are_gone(2.0)


class SkipUnusedState:
    """The state of :func:`skip_unused_hook` for one DDP module.

    Making one is a collective call: every rank of the module's process group makes it, with the same policy. It opens a
    small gloo group of its own, over which the ranks agree on what was used.

    Args:
        ddp: the module that the hook will be registered with.
        policy: a preset's name (``"allreduce"``, ``"skip_unused"``, ``"skip_zeros"``, ``"auto"``) or a
            :class:`ddp_hooks.Policy`.

    Raises:
        TypeError: ``ddp`` is not a :class:`~torch.nn.parallel.DistributedDataParallel`.
        ValueError: no such policy.
        RuntimeError: on every rank, when one rank's module has a setting that cannot be supported, or when ranks
            differ in policy, world or parameters; the message names both.

    Example::

        state = ddp_hooks.SkipUnusedState(ddp)
        ddp.register_comm_hook(state, ddp_hooks.skip_unused_hook)
    """

    def __init__(self, ddp: DistributedDataParallel, policy: Policy | str = "auto") -> None:
        self._start(Statistics())
        self._bind(ddp, policy, native=False)

    def _start(self, earlier: Statistics) -> None:
        self._policy = PRESETS["auto"]
        self._earlier = earlier  # statistics of an earlier run that this state goes on from
        self._engine: Any = None
        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        self._control_groups: ControlGroups | None = None  # while it serves a module
        self._native = False
        self._handles: list[Any] = []  # of the hooks on the module's forward pass
        self._finalizer: Any = None  # closes when the module goes
        # The module's parameters as the engine counts them: those of DDP's Reducer, then those it does not know.
        self._parameters: list[torch.Tensor] = []
        self._names: list[str] = []
        self._places: dict[str, int] = {}  # of the names
        self._index: ParameterIndex | None = None
        self._declared: list[set[str]] = []  # one set for each `unused` block that is open
        self._declared_once: set[str] = set()  # for the next forward pass
        self._declared_now: set[str] = set()  # for the one that has begun

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._policy

    def bind(self, ddp: DistributedDataParallel) -> None:
        """Tie a state that was unpickled or copied to a module; every rank calls it. A new state is tied already.

        Args:
            ddp: the module that the hook will be registered with.

        Raises:
            RuntimeError: the state is tied to a module; otherwise as for the class.
        """
        self._bind(ddp, self._policy, native=False)

    def _bind(self, module: torch.nn.Module, policy: Policy | str, *, native: bool) -> None:
        function = "register" if native else "SkipUnusedState"
        ddp = find_ddp(module, function)
        # From here on problems are collected and raised together, so that no rank is left waiting for the others.
        resolved, bad_policy = _resolve_or_error(policy, self._policy)
        problem = None if bad_policy is None else str(bad_policy)
        if self._engine is not None:
            problem = "the state already serves a DistributedDataParallel module; make one state for each module"
        problem = problem or why_unsupported(ddp)
        # A module that is refused may lack what is described.
        description = {} if problem else {_REGISTERED: "no", **describe(resolved, ddp, *_parameters_of(ddp))}
        sharable = _groups_to_share(ddp)
        offer = (new_name(), tuple(sharable))
        offers = settle(function, propose(ddp, function, description, problem, offer), bad_policy)
        shared = set(sharable).intersection(*(names for _, names in offers))
        groups = sharable[min(shared)] if shared else open_control_groups(ddp, function, offers[0][0])
        before = _serving.get(ddp)
        if before is not None and (other := before()) is not None:
            other.close()
        self._policy = resolved
        self._control_groups = groups
        self._native = native
        self._ddp = weakref.ref(ddp)
        self._start_engine(ddp)
        self._handles = [
            ddp.register_forward_pre_hook(self._forward_begins),
            ddp.register_forward_hook(self._forward_done),
        ]
        _serving[ddp] = weakref.ref(self)
        if native:
            # What DDP notes of a hook that is registered through it.
            ddp._comm_hooks.append((skip_unused_hook, self))
            if ddp.logger is not None:
                ddp.logger._set_comm_hook_name(skip_unused_hook.__qualname__)

    def _register_again(self, policy: Policy | str) -> None:
        ddp = self._require_module()
        resolved, error = _resolve_or_error(policy, self._policy)
        problem = None if error is None else str(error)
        if problem is None and resolved != self._policy:
            problem = (
                f"expected the policy that the module's hook has already ({self._policy.name!r}), received "
                f"{resolved.name!r}; call state.set_policy() on every rank to change it, or state.close() first"
            )
        description = {_REGISTERED: "yes", **describe(resolved, ddp, *_parameters_of(ddp))}
        settle("register", propose(ddp, "register", description, problem, ("", ())), error)

    def _start_engine(self, ddp: DistributedDataParallel) -> None:
        self._engine = self._make_engine(ddp)
        if self._native:
            self._engine.register_natively()
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(ddp, _module_is_gone, self._engine, weakref.ref(self))
        self._finalizer.atexit = False

    def close(self) -> None:
        """Take the hook off the module, which trains on as plain DDP, and close the groups that the state opened.

        Every rank calls it, between two steps. The state keeps its policy and its statistics; a closed one stays closed
        until it is bound again. It need not be called: a state closes when its module goes.

        Raises:
            RuntimeError: a backward pass is under way.
        """
        if self._engine is None:
            return
        ddp = None if self._ddp is None else self._ddp()
        registered = ddp is not None and any(state is self for _, state in ddp._comm_hooks)
        self._engine.close(remove_hook=registered, dying=False)
        if ddp is not None:
            ddp._comm_hooks = [(hook, state) for hook, state in ddp._comm_hooks if state is not self]
        self._leave_module()
        _C.wait_until_groups_are_gone(_CLOSING_SECONDS)

    def _leave_module(self) -> None:
        self._earlier = self.stats()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._finalizer.detach()
        self._engine = None
        self._control_groups = None
        self._index = None
        self._ddp = None

    def _make_engine(self, ddp: DistributedDataParallel) -> Any:
        reduced, late = _parameters_of(ddp)
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        self._parameters = [*reduced, *late]
        self._names = [names.get(id(parameter), f"#{i}") for i, parameter in enumerate(self._parameters)]
        self._places = {name: place for place, name in enumerate(self._names)}
        self._index = ParameterIndex(ddp.module)
        assert self._control_groups is not None
        engine = _C.Engine(
            reducer=ddp.reducer,
            control_groups=self._control_groups.groups,
            settings=_engine_settings(self._policy, describe(self._policy, ddp, reduced, late)),
            late_parameters=late,
            names=self._names,
        )
        # Through weak references: Python's collector does not see cycles that lead through the engine.
        state = weakref.ref(self)

        def rebuild() -> None:
            living = state()
            if living is not None:
                living._rebuild()

        engine.set_rebuild(rebuild)
        return engine

    def _replace_engine(self, ddp: DistributedDataParallel) -> None:
        """Serve the module's new Reducer, with the groups and the statistics so far."""
        self._earlier = self.stats()
        self._engine.close(remove_hook=False, dying=True)
        self._start_engine(ddp)
        if not self._native:
            dist._register_comm_hook(ddp.reducer, self, skip_unused_hook)  # type: ignore[attr-defined]
        self._declare()

    def _agree_between_steps(
        self,
        function: str,
        description: dict[str, str],
        problem: str | None,
        own: object = None,
        error: Exception | None = None,
    ) -> list[Any]:
        """Agree, and bring the control groups to the same point: a failed pass may have used them here."""
        ddp = self._require_module()
        both = (self._engine.has_early_exchange(), own)
        proposals = propose(ddp, function, description, problem, both)
        if any(pending for pending, _ in (each.own for each in proposals)):
            self._engine.finish_early_exchange()
        return [theirs for _, theirs in settle(function, proposals, error)]

    def _rebuild(self) -> None:
        from .freezing import rebuild

        rebuild(self._require_module())

    def _is_watched(self, module: torch.nn.Module) -> bool:
        # Inside a compiled graph there are no hooks to set; the exchange then starts with the first bucket. Before a
        # hook is registered nobody would take up what is exchanged.
        if self._engine is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return False
        return bool(module._comm_hooks)

    def _forward_begins(self, module: torch.nn.Module, args: Any) -> None:
        if not self._is_watched(module) or not module.require_backward_grad_sync:
            return
        # What was declared for a forward pass that raised is not this one's.
        if self._declared_now or self._declared_once:
            self._declared_now, self._declared_once = self._declared_once, set()
            self._declare()

    def _forward_done(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not self._is_watched(module):
            return
        synchronises = module.require_backward_grad_sync
        outputs = list(_find_tensors(output)) if synchronises else []  # type: ignore[no-untyped-call]
        self._engine.forward_done(outputs, synchronises)
        if synchronises and self._declared_now:
            self._declared_now = set()
            self._declare()

    def _require_module(self) -> DistributedDataParallel:
        ddp = None if self._ddp is None else self._ddp()
        if ddp is None:
            raise RuntimeError(
                "SkipUnusedState: expected a state that serves a module, received one whose module is gone, that was "
                "closed, or that was unpickled; call state.bind(ddp) on every rank"
            )
        return ddp

    def set_policy(self, policy: Policy | str) -> None:
        """Change the policy between two steps; every rank calls it with the same one.

        Args:
            policy: as for the class.

        Raises:
            TypeError, ValueError: the policy is none; the other ranks raise a RuntimeError then.
            RuntimeError: on every rank, when ranks differ; or the state serves no module, or a backward pass is under
                way.
        """
        resolved, bad_policy = _resolve_or_error(policy, self._policy)
        self._change_policy("set_policy", resolved, bad_policy)

    def _change_policy(self, function: str, policy: Policy, error: Exception | None) -> None:
        ddp = self._require_module()
        problem = None if error is None else str(error)
        if problem is None and _C.reducer_is_in_backward(ddp.reducer):
            problem = "a backward pass is under way; call it between two steps"
        description = describe(policy, ddp, *_parameters_of(ddp))
        self._agree_between_steps(function, description, problem, error=error)
        self._engine.configure(_engine_settings(policy, description))
        self._policy = policy

    def stats(self) -> Statistics:
        """Return the counters so far, those of the run before a checkpoint included."""
        if self._engine is None:
            return self._earlier
        return self._earlier + Statistics.read(self._engine.statistics())

    def reset_stats(self) -> None:
        """Set all counters to zero."""
        self._earlier = Statistics()
        if self._engine is not None:
            self._engine.reset_statistics()

    def usage(self) -> dict[str, ParameterUsage]:
        """Return by parameter name who used it in the last step.

        Returns:
            One entry for each parameter that DDP reduces, in DDP's order; empty before the first step.
        """
        self._require_module()
        here, anywhere = self._engine.usage()
        if len(here) == 0:
            return {}
        used_here, used_anywhere = set(here.indices()), set(anywhere.indices())
        return {
            name: ParameterUsage(
                name, parameter.numel(), i in used_here, i in used_anywhere, not parameter.requires_grad
            )
            for i, (name, parameter) in enumerate(zip(self._names, self._parameters, strict=True))
        }

    def serves(self, ddp: DistributedDataParallel) -> bool:
        """Say whether this state belongs to that module."""
        return self._engine is not None and self._ddp is not None and self._ddp() is ddp

    @contextmanager
    def unused(self, *what: Selector) -> Iterator[None]:
        """Declare that forward passes in this block do not use some parameters.

        For ``find_unused_parameters=False``: DDP then neither waits for their gradients nor searches the graph, and
        what no rank uses is not sent. Ranks may declare different parameters. With ``find_unused_parameters=True`` it
        changes nothing, because DDP searches anyway. The block has to hold the forward pass; backward may come later.

        Args:
            what: modules, parameters, or patterns of parameter names (as in :func:`ddp_hooks.freeze`).

        Raises:
            ValueError: a pattern matches nothing.
            RuntimeError: from ``backward()``, when a declared parameter receives a gradient after all; names it.
        """
        names = self._names_of(what)
        self._declared.append(names)
        self._declare()
        try:
            yield
        finally:
            self._declared.remove(names)
            self._declare()

    def declare_unused(self, *what: Selector) -> None:
        """Declare that the next synchronising forward pass does not use some parameters; see :meth:`unused`.

        Args:
            what: as for :meth:`unused`.

        Raises:
            ValueError, RuntimeError: as for :meth:`unused`.
        """
        self._declared_once |= self._names_of(what)

    def _names_of(self, what: tuple[Selector, ...]) -> set[str]:
        self._require_module()
        assert self._index is not None
        return set(self._index.select(*what))

    def _declare(self) -> None:
        declared = self._declared_now.union(*self._declared)
        self._engine.declare_unused([self._places[name] for name in declared if name in self._places])

    def state_dict(self) -> dict[str, Any]:
        """Return settings and statistics as plain values, for a checkpoint."""
        return {"version": 1, "policy": self._policy.to_dict(), "statistics": self.stats().to_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the settings and statistics of a checkpoint; every rank calls it.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            ValueError: of another version of this package.
            RuntimeError: as for :meth:`set_policy`.
        """
        policy, statistics = self._policy, Statistics()
        error: Exception | None = None
        try:
            policy, statistics = _decode(state_dict)
        except (TypeError, ValueError) as wrong:
            error = wrong
        if self._engine is not None:
            self._change_policy("load_state_dict", policy, error)
        elif error is not None:
            raise error
        self._policy = policy
        self.reset_stats()
        self._earlier = statistics

    def __getstate__(self) -> dict[str, Any]:
        """Leave the module, its engine and the group behind: they cannot travel, and `bind` makes them again."""
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back without a module; see :meth:`bind`."""
        policy, statistics = _decode(state)
        self._start(statistics)
        self._policy = policy

    def __repr__(self) -> str:
        """Name the policy, and whether the state serves a module."""
        return f"SkipUnusedState(policy={self._policy.name!r}, {'bound' if self._engine is not None else 'unbound'})"


def skip_unused_hook(
    state: SkipUnusedState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks, sending only what some rank used.

    Register it with ``ddp.register_comm_hook(state, skip_unused_hook)``.

    Args:
        state: the :class:`SkipUnusedState` that was made for this module.
        bucket: one bucket of gradients, as DDP hands it over.

    Returns:
        A future of the bucket's buffer, in which gradients are averaged. Errors arrive through it and make
        ``backward()`` raise.
    """
    if not isinstance(bucket, dist.GradBucket):  # type: ignore[attr-defined]
        raise TypeError(
            f"skip_unused_hook: expected a GradBucket, received {type(bucket).__name__}; DDP's Python reducer "
            "(compiled autograd) is not supported: set torch._dynamo.config.optimize_ddp = True before wrapping"
        )
    engine = getattr(state, "_engine", None)
    if engine is None:
        received = repr(state) if isinstance(state, SkipUnusedState) else type(state).__name__
        return _C.failed_future(  # type: ignore[no-any-return]
            f"skip_unused_hook: expected a SkipUnusedState that serves this module, received {received}; register it "
            "with ddp.register_comm_hook(ddp_hooks.SkipUnusedState(ddp), ddp_hooks.skip_unused_hook), and after "
            "unpickling a state call state.bind(ddp) first"
        )
    return engine.run(bucket)  # type: ignore[no-any-return]


def register(ddp: torch.nn.Module, policy: Policy | str = "auto") -> SkipUnusedState:
    """Register the hook natively: gradients then travel without Python and its lock. Every rank calls it.

    Calling it again with the same policy returns the state that the module has.

    Args:
        ddp: the module, or what ``torch.compile`` returned for it.
        policy: as for :class:`SkipUnusedState`.

    Returns:
        The state, for statistics and usage. It does the same as the one registered through Python.

    Raises:
        TypeError, ValueError, RuntimeError: as for :class:`SkipUnusedState`; also when another hook is registered
            already, or this one with another policy.
    """
    module = find_ddp(ddp, "register")
    state = registered_state(module)
    if state is not None:
        state._register_again(policy)
        return state
    state = SkipUnusedState.__new__(SkipUnusedState)
    state._start(Statistics())
    state._bind(module, policy, native=True)
    return state


def registered_state(ddp: DistributedDataParallel) -> SkipUnusedState | None:
    """Return the state of this package's hook on the module, if it has one."""
    for hook, state in getattr(ddp, "_comm_hooks", ()):
        if hook is skip_unused_hook and isinstance(state, SkipUnusedState) and state.serves(ddp):
            return state
    return None


def _module_is_gone(engine: Any, state: "weakref.ref[SkipUnusedState]") -> None:
    living = state()
    if living is not None and living._engine is engine:
        living._leave_module()
    engine.close(remove_hook=False, dying=True)
    del engine
    _C.wait_until_groups_are_gone(_CLOSING_SECONDS)


def _groups_to_share(ddp: DistributedDataParallel) -> dict[str, ControlGroups]:
    """Find the groups of states that serve the same model, wrapped before, over the same ranks."""
    found = {}
    for other, reference in list(_serving.items()):
        state = reference()
        if state is None or state._control_groups is None or other is ddp:
            continue
        alike = other.module is ddp.module and other.process_group is ddp.process_group
        if alike and not state._engine.has_early_exchange():
            found[state._control_groups.name] = state._control_groups
    return found


def _parameters_of(ddp: DistributedDataParallel) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what the module's Reducer reduces, and what it does not know."""
    reduced = _C.reducer_parameters(ddp.reducer)
    known = {id(parameter) for parameter in reduced}
    late = [
        parameter
        for name, parameter in ddp.module.named_parameters()
        if id(parameter) not in known and name not in ddp.parameters_to_ignore
    ]
    return reduced, late


def _decode(state_dict: dict[str, Any]) -> tuple[Policy, Statistics]:
    """Read what :meth:`SkipUnusedState.state_dict` returned; raise a TypeError or ValueError if it is anything else."""
    fields = ("version", "policy", "statistics")
    check_fields("SkipUnusedState.load_state_dict", state_dict, fields, fields)
    if type(state_dict["version"]) is not int or state_dict["version"] != 1:
        raise ValueError(
            f"SkipUnusedState: expected a state_dict of version 1, received version {short(state_dict['version'])}; it "
            "is of another version of ddp_hooks"
        )
    return Policy.from_dict(state_dict["policy"]), Statistics.from_dict(state_dict["statistics"])


def _resolve_or_error(policy: Policy | str, otherwise: Policy) -> tuple[Policy, Exception | None]:
    try:
        return resolve(policy), None
    except (TypeError, ValueError) as error:
        return otherwise, error


def _engine_settings(policy: Policy, description: dict[str, str]) -> Any:
    # On a GPU the answer of a scan holds the host back to one bucket behind the device, so more has to be gained.
    least_zeros = 0.0 if description.get("device", "cpu") == "cpu" else _MIN_ZERO_FRACTION_ON_DEVICE
    digest = hashlib.blake2b(repr(sorted(description.items())).encode(), digest_size=8).digest()
    return _C.EngineSettings(
        graph_detector=policy.graph,
        values_detector=_VALUES_DETECTOR[policy.values],
        plan=_C.PlanSettings(
            in_place_bytes=policy.in_place_bytes, pack_bytes=policy.pack_bytes, gap_fraction=policy.gap_fraction
        ),
        probe=_C.ProbeSettings(
            min_zero_fraction=max(policy.min_zero_fraction, least_zeros),
            hold_steps=policy.hold_steps,
            first_pause_steps=policy.first_pause_steps,
            longest_pause_steps=policy.longest_pause_steps,
        ),
        rebuild_after_steps=policy.rebuild_after,
        configuration=int.from_bytes(digest, "little"),
    )
