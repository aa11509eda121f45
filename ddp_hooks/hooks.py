"""The hook, its state, and the ways to register it.

There is no ``from __future__ import annotations`` here: DDP compares the annotations of a hook as objects.
"""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import _extension
from .errors import RefusedError
from .policies import PRESETS, Policy, resolve
from .serving.ddp_methods import keep_place
from .serving.disabling import DisabledService
from .serving.modules import find_ddp
from .serving.parameters import Selector
from .serving.registration import serve, service_of
from .serving.service import Service
from .statistics import ParameterUsage, Statistics
from .wording import check_fields, short

_C = _extension.load()

_MAKE_ANOTHER = (
    "call state = ddp_hooks.register(ddp) on every rank, or register a new SkipUnusedState(ddp); to continue from "
    "saved = state.state_dict(), call state.load_state_dict(saved)"
)

# Every state that was tied to a module, in this order.
_tied: list[weakref.ref["SkipUnusedState"]] = []


class SkipUnusedState:
    """The state of :func:`skip_unused_hook` for one DDP module.

    Making one is a collective call: every rank of the module's process group makes it, with the same policy. It opens a
    small gloo group of its own, over which the ranks agree on what was used. Then register it, as below; after a step
    that was reduced without any hook there is a warning.

    Args:
        ddp: the module that the hook will be registered with.
        policy: a preset's name (``"allreduce"``, ``"skip_unused"``, ``"skip_zeros"``, ``"auto"``) or a
            :class:`ddp_hooks.Policy`.
        settings: fields of the policy, or of its :class:`ddp_hooks.Tuning`, to set differently, as in
            ``SkipUnusedState(ddp, "auto", rebuild_after=100)``.

    Raises:
        TypeError: ``ddp`` is not a :class:`~torch.nn.parallel.DistributedDataParallel`; or no such setting.
        ValueError: no such policy, or a setting is out of range.
        RuntimeError: on every rank, when one rank's module has a setting that cannot be supported, or when ranks
            differ in policy, world or parameters; the message names both.

    Example::

        state = ddp_hooks.SkipUnusedState(ddp)
        ddp.register_comm_hook(state, ddp_hooks.skip_unused_hook)
    """

    def __init__(self, ddp: DistributedDataParallel, policy: Policy | str = "auto", **settings: Any) -> None:
        resolved, mistake = _resolve("SkipUnusedState", policy, settings)
        self._start(resolved, Statistics())
        try:
            self._attach(find_ddp(ddp, "SkipUnusedState"), mistake, native=False)
        except RefusedError as refusal:
            raise (mistake or refusal).with_traceback(None) from refusal.__cause__

    def _start(self, policy: Policy, earlier: Statistics) -> None:
        self._policy = policy
        self._earlier = earlier  # of the run before a checkpoint, and of modules that were served before
        self._origin = 0, Statistics()  # see `origin_of`
        self._service: Service | DisabledService | None = None  # also when it is closed

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._policy

    def _attach(self, ddp: DistributedDataParallel, mistake: Exception | None, *, native: bool) -> None:
        function = "register" if native else "SkipUnusedState"
        problem = _problem(function, mistake)
        self._service = serve(ddp, function, self._policy, problem, hook=skip_unused_hook, state=self, native=native)
        _tied[:] = [other for other in _tied if other() not in (None, self)] + [weakref.ref(self)]

    def _is_attached(self) -> bool:
        return self._service is not None and self._service.engine is not None

    def _require_service(self) -> Service | DisabledService:
        if self._service is None or self._service.ddp is None:
            raise RuntimeError(
                f"SkipUnusedState: expected a state that serves a module, received one {self._why_detached()}; "
                f"{_MAKE_ANOTHER}"
            )
        return self._service

    def _why_detached(self) -> str:
        return "that was unpickled or copied" if self._service is None else self._service.ended

    def close(self) -> None:
        """Take the hook off the module, which trains on as plain DDP, and close the groups that the state opened.

        Every rank calls it, between two steps, and waits for the others, also if its own module has gone already. The
        state keeps its policy and its statistics; a closed one stays closed for good. It need not be called: a state
        closes when its module goes, and then asks nobody. If the process group was destroyed, and while an exception is
        handled, after 5 seconds, it closes on this rank alone.

        Raises:
            RuntimeError: on every rank, when a backward pass is under way on one.
            RanksAbsentError: ranks did not call it within the process group's timeout; names them, and where they are.
                Nothing has changed then.
        """
        if self._service is None:
            return
        self._service.agree_to_close()
        ddp = self._service.ddp
        self._service.close()
        if ddp is not None:
            keep_place(ddp)

    def set_policy(self, policy: Policy | str, **settings: Any) -> None:
        """Change the policy between two steps; every rank calls it with the same one.

        Args:
            policy: as for the class.
            settings: as for the class; what is not given is the policy's own, not that of the one before.

        Raises:
            TypeError, ValueError: no such policy or setting; the other ranks raise a RuntimeError then.
            RuntimeError: on every rank, when ranks differ; or the state serves no module, or a backward pass is under
                way.
        """
        service = self._require_service()
        resolved, mistake = _resolve("set_policy", policy, settings)
        try:
            service.change_policy(resolved, _problem("set_policy", mistake))
        except RefusedError as refusal:
            raise (mistake or refusal).with_traceback(None) from refusal.__cause__
        self._policy = resolved

    def stats(self) -> Statistics:
        """Return the counters so far, those of the run before a checkpoint included."""
        return self._earlier if self._service is None else self._earlier + self._service.statistics()

    def reset_stats(self) -> None:
        """Set all counters to zero."""
        self._restart_statistics(Statistics())

    def _restart_statistics(self, earlier: Statistics) -> None:
        self._earlier, self._origin = earlier, (self._origin[0] + 1, earlier)
        if self._service is not None:
            self._service.reset_statistics()

    def usage(self) -> dict[str, ParameterUsage]:
        """Return by parameter name who used it in the last step.

        Returns:
            One entry for each parameter that DDP reduces, in DDP's order; empty before the first step.
        """
        return self._require_service().usage()

    def serves(self, ddp: DistributedDataParallel) -> bool:
        """Say whether this state belongs to that module."""
        return self._service is not None and self._service.ddp is ddp

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
            RuntimeError: from ``backward()``, when a declared parameter enters a graph within backward only, as under
                reentrant checkpointing; names it. Any other that is used after all gets plain DDP's gradient.
        """
        with self._require_service().unused(*what):
            yield

    def declare_unused(self, *what: Selector) -> None:
        """Declare that the next synchronising forward pass does not use some parameters; see :meth:`unused`.

        Args:
            what: as for :meth:`unused`.

        Raises:
            ValueError, RuntimeError: as for :meth:`unused`.
        """
        self._require_service().declare_unused(*what)

    def state_dict(self) -> dict[str, Any]:
        """Return the policy and the statistics as plain values, for a checkpoint.

        :meth:`load_state_dict` goes on with the statistics; the policy is a record of what the run used.
        """
        return {"version": 2, "policy": self._policy.to_dict(), "statistics": self.stats().to_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the statistics of a checkpoint; the policy in force stays.

        Nothing is sent to other ranks. What :func:`ddp_hooks.rebuild` had taken out of the module's Reducer is in it
        again, because a resumed run wraps the whole model: freeze it, and call ``rebuild`` again.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError, ValueError: it is something else, or comes from another version of this package.
        """
        self._restart_statistics(_read_statistics(state_dict))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the module, its engine and the group behind: they cannot travel.

        DDP copies and pickles what is registered with it together with the module. A copy of a state serves no module:
        it keeps policy and statistics, and whoever uses it for more is told how to make another.
        """
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back without a module."""
        statistics = _read_statistics(state)
        self._start(Policy.from_dict(state["policy"]), statistics)

    def __repr__(self) -> str:
        """Name the policy, and whether the state serves a module."""
        return f"SkipUnusedState(policy={self._policy.name!r}, {'attached' if self._is_attached() else 'detached'})"


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
    service = state._service if isinstance(state, SkipUnusedState) else None
    engine = None if service is None else service.engine
    if engine is None:
        received = f"one {state._why_detached()}" if isinstance(state, SkipUnusedState) else type(state).__name__
        # DDP keeps the hook that it has.
        return _C.failed_future(  # type: ignore[no-any-return]
            f"skip_unused_hook: expected a SkipUnusedState that serves this module, received {received}; wrap the "
            f"model in DistributedDataParallel again, and {_MAKE_ANOTHER}"
        )
    return engine.run(bucket)


def register(ddp: torch.nn.Module, policy: Policy | str = "auto", **settings: Any) -> SkipUnusedState:
    """Register the hook natively: gradients then travel without Python and its lock. Every rank calls it.

    Calling it again with the same policy returns the state that the module has.

    Args:
        ddp: the module, or what ``torch.compile`` returned for it.
        policy: as for :class:`SkipUnusedState`.
        settings: as for :class:`SkipUnusedState`, as in ``register(ddp, "auto", rebuild_after=100)``.

    Returns:
        The state, for statistics and usage. It does the same as the one registered through Python.

    Raises:
        TypeError, ValueError, RuntimeError: as for :class:`SkipUnusedState`; also when another hook is registered
            already, or this one with another policy.
    """
    module = find_ddp(ddp, "register")
    service = service_of(module)
    state = None if service is None else service.state()
    # From here on problems are collected and raised together, so that no rank is left waiting for the others.
    resolved, mistake = _resolve("register", policy, settings)
    try:
        if service is not None and isinstance(state, SkipUnusedState):
            service.register_again(resolved, _problem("register", mistake))
            keep_place(module)
        else:
            state = SkipUnusedState.__new__(SkipUnusedState)
            state._start(resolved, Statistics())
            state._attach(module, mistake, native=True)
    except RefusedError as refusal:
        raise (mistake or refusal).with_traceback(None) from refusal.__cause__
    return state


def origin_of(state: SkipUnusedState) -> tuple[int, Statistics]:
    """Return how often the state's counters were set, by a reset or a checkpoint, and to what the last time."""
    return state._origin


def states() -> list[SkipUnusedState]:
    """Return the states that serve modules of this process now, in the order in which they were tied to them.

    They are those of :func:`register`, of :class:`SkipUnusedState` and of :func:`ddp_hooks.enable`; not those that were
    closed, or whose modules are gone.
    """
    living = [state() for state in _tied]
    return [state for state in living if state is not None and state._service is not None and state._service.ddp]


def _read_statistics(state_dict: dict[str, Any]) -> Statistics:
    """Read what :meth:`SkipUnusedState.state_dict` returned; raise a TypeError or ValueError if it is anything else."""
    fields = ("version", "policy", "statistics")
    check_fields("SkipUnusedState.load_state_dict", state_dict, fields, fields)
    version = state_dict["version"]
    if type(version) is not int or version != 2:
        raise ValueError(
            f"SkipUnusedState.load_state_dict: expected a state_dict of version 2, received version {short(version)}, "
            "written by another version of ddp_hooks"
        )
    return Statistics.from_dict(state_dict["statistics"])


def _resolve(
    function: str, policy: Policy | str, settings: Mapping[str, Any]
) -> tuple[Policy, TypeError | ValueError | None]:
    """Return the policy; or any, and what is wrong with what was asked for: the other ranks have to be told."""
    try:
        return resolve(policy, settings, function), None
    except (TypeError, ValueError) as mistake:
        return PRESETS["auto"], mistake


def _problem(function: str, mistake: Exception | None) -> str | None:
    return None if mistake is None else str(mistake).removeprefix(f"{function}: ")
