"""The hook, its state, and the ways to register it.

There is no ``from __future__ import annotations`` here: DDP compares the annotations of a hook as objects.
"""

import hashlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from . import _extension
from .parameters import Selector, select
from .policies import PRESETS, Policy, resolve
from .registration import ControlGroups, agree, describe, make_control_groups, why_unsupported
from .statistics import ParameterUsage, Statistics

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
        self._control_groups: Any = None  # ControlGroups, while it serves a module
        self._native = False
        self._forward_handle: Any = None
        # The module's parameters as the engine counts them: those of DDP's Reducer, then those it does not know.
        self._parameters: list[torch.Tensor] = []
        self._names: list[str] = []
        self._description: dict[str, str] = {}
        self._declared: list[set[str]] = []  # one set for each `unused` block that is open
        self._declared_once: set[str] = set()

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

    def _bind(self, ddp: DistributedDataParallel, policy: Policy | str, *, native: bool) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                f"SkipUnusedState: expected a DistributedDataParallel module, received {type(ddp).__name__}; "
                "wrap the model first, and make the state before torch.compile"
            )
        if self._engine is not None:
            raise RuntimeError(
                "SkipUnusedState: expected a state without a module, received one that already serves a "
                "DistributedDataParallel module; make one state for each module"
            )
        # From here on problems are collected and raised together, so that no rank is left waiting for the others.
        self._policy, bad_policy = _resolve_or_error(policy, self._policy)
        problem = bad_policy or why_unsupported(ddp)
        # The groups stay if this fails: torch would give the next ones their names, and with them their addresses.
        groups = make_control_groups(ddp)
        engine: Any = self._make_engine(ddp, groups) if problem is None else None
        _agree_or_raise(groups, self._description, problem)
        if native:
            engine.register_natively(ddp.reducer)
        self._control_groups = groups
        self._engine = engine
        self._native = native
        self._ddp = weakref.ref(ddp)
        self._forward_handle = ddp.register_forward_hook(self._forward_done)
        before = _serving.get(ddp)
        if before is not None and (other := before()) is not None:
            other._release()
        _serving[ddp] = weakref.ref(self)

    def _release(self) -> None:
        """Leave the module to another state; what this one was made for was never registered."""
        self._earlier = self.stats()
        self._engine = None
        self._ddp = None
        self._forward_handle.remove()

    def _make_engine(self, ddp: DistributedDataParallel, groups: ControlGroups) -> Any:
        reduced = _C.reducer_parameters(ddp.reducer)
        known = {id(parameter) for parameter in reduced}
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        late = [
            parameter
            for name, parameter in ddp.module.named_parameters()
            if id(parameter) not in known and name not in ddp.parameters_to_ignore
        ]
        self._parameters = [*reduced, *late]
        self._names = [names.get(id(parameter), f"#{i}") for i, parameter in enumerate(self._parameters)]
        self._description = describe(self._policy, ddp, reduced, late)
        engine = _C.Engine(
            reducer=ddp.reducer,
            control_group=groups.all,
            axis_groups=groups.axes,
            settings=_engine_settings(self._policy, self._description),
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
        """Serve the module's new Reducer, with the group and the statistics so far."""
        self._earlier = self.stats()
        self._engine = self._make_engine(ddp, self._control_groups)
        if self._native:
            self._engine.register_natively(ddp.reducer)
        else:
            dist._register_comm_hook(ddp.reducer, self, skip_unused_hook)  # type: ignore[attr-defined]
        self._declare()

    def _finish_exchanges(self, ddp: DistributedDataParallel) -> None:
        """Bring the ranks' control groups to the same point: a failed backward pass may have used it on one rank."""
        pending: list[Any] = [None] * dist.get_world_size(ddp.process_group)
        # Objects travel through the current device, which need not be the module's; two ranks may share it.
        with torch.cuda.device(ddp.device) if ddp.device_type == "cuda" else nullcontext():
            dist.all_gather_object(pending, self._engine.has_early_exchange(), group=ddp.process_group)
        if any(pending):
            self._engine.finish_early_exchange()

    def _rebuild(self) -> None:
        from .freezing import rebuild

        rebuild(self._require_module())

    def _forward_done(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        # Inside a compiled graph there are no hooks to set; the exchange then starts with the first bucket. Before a
        # hook is registered nobody would take up what is exchanged.
        if self._engine is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if not module._comm_hooks:
            return
        synchronises = module.require_backward_grad_sync
        outputs = list(_find_tensors(output)) if synchronises else []  # type: ignore[no-untyped-call]
        self._engine.forward_done(outputs, synchronises)
        if synchronises and self._declared_once:
            self._declared_once.clear()
            self._declare()

    def _require_module(self) -> DistributedDataParallel:
        ddp = None if self._ddp is None else self._ddp()
        if ddp is None:
            raise RuntimeError(
                "SkipUnusedState: expected a state that serves a module, received one without; call state.bind(ddp) on "
                "every rank after unpickling it"
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
        ddp = self._require_module()
        policy, bad_policy = _resolve_or_error(policy, self._policy)
        self._finish_exchanges(ddp)
        reduced = _C.reducer_parameters(ddp.reducer)
        description = describe(policy, ddp, reduced, self._parameters[len(reduced) :])
        _agree_or_raise(self._control_groups, description, bad_policy)
        self._engine.configure(_engine_settings(policy, description))
        self._policy = policy
        self._description = description

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
        return {
            name: ParameterUsage(name, parameter.numel(), here.test(i), anywhere.test(i), not parameter.requires_grad)
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
        names = set(select(self._require_module().module, *what))
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
        self._declared_once |= set(select(self._require_module().module, *what))
        self._declare()

    def _declare(self) -> None:
        declared = self._declared_once.union(*self._declared)
        self._engine.declare_unused([i for i, name in enumerate(self._names) if name in declared])

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
        if state_dict.get("version") != 1:
            raise ValueError(f"SkipUnusedState: expected a state_dict of version 1, received {state_dict!r}")
        policy = Policy(**state_dict["policy"])
        if self._engine is None:
            self._policy = policy
        else:
            self.set_policy(policy)
        self.reset_stats()
        self._earlier = Statistics(**state_dict["statistics"])

    def __getstate__(self) -> dict[str, Any]:
        """Leave the module, its engine and the group behind: they cannot travel, and `bind` makes them again."""
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back without a module; see :meth:`bind`."""
        self._start(Statistics(**state["statistics"]))
        self._policy = Policy(**state["policy"])

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


def register(ddp: DistributedDataParallel, policy: Policy | str = "auto") -> SkipUnusedState:
    """Register the hook natively: gradients then travel without Python and its lock. Every rank calls it.

    Args:
        ddp: the module.
        policy: as for :class:`SkipUnusedState`.

    Returns:
        The state, for statistics and usage. It does the same as the one registered through Python.

    Raises:
        TypeError, ValueError, RuntimeError: as for :class:`SkipUnusedState`; also when a hook is registered already.
    """
    state = SkipUnusedState.__new__(SkipUnusedState)
    state._start(Statistics())
    state._bind(ddp, policy, native=True)
    # What DDP notes of a hook that is registered through it.
    ddp._comm_hooks.append((skip_unused_hook, state))
    if ddp.logger is not None:
        ddp.logger._set_comm_hook_name(skip_unused_hook.__qualname__)
    return state


def _resolve_or_error(policy: Policy | str, otherwise: Policy) -> tuple[Policy, Exception | None]:
    try:
        return resolve(policy), None
    except (TypeError, ValueError) as error:
        return otherwise, error


def _agree_or_raise(groups: ControlGroups, description: dict[str, str], problem: Exception | str | None) -> None:
    """Raise on every rank if any has a problem; where the problem is an exception, that rank raises it."""
    try:
        agree(groups.all, description, None if problem is None else str(problem))
    except RuntimeError:
        if isinstance(problem, Exception):
            raise problem from None
        raise


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
