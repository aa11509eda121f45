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
from .serving.topology import Topology
from .statistics import ParameterUsage, Statistics
from .wording import check_fields, short

_C = _extension.load()

_MAKE_ANOTHER = (
    "call state = ddp_hooks.register(ddp) on every rank, or register a new SkipUnusedState(ddp); to continue from "
    "saved = state.state_dict(), call state.load_state_dict(saved)"
)

# Every state that was attached to a module, in the order in which that happened.
_tied: list[weakref.ref["SkipUnusedState"]] = []


class SkipUnusedState:
    """The state of :func:`skip_unused_hook` for one DDP module.

    Creating a state is a collective call: every rank of the module's process group makes it, with the same policy. It
    opens a small gloo group over which the ranks agree on what was used. Then register the state as in the example; if
    a step is reduced without any hook, a warning says so.

    Args:
        ddp: the module that the hook will be registered with.
        policy: a preset's name (``"allreduce"``, ``"skip_unused"``, ``"skip_zeros"``, ``"auto"``) or a
            :class:`ddp_hooks.Policy`.
        settings: fields of the policy, or of its :class:`ddp_hooks.Tuning`, to set differently, as in
            ``SkipUnusedState(ddp, "auto", rebuild_after=100)``.

    Raises:
        TypeError: ``ddp`` is not a :class:`~torch.nn.parallel.DistributedDataParallel`, or a setting does not exist.
        ValueError: the policy does not exist, or a setting is out of range.
        RuntimeError: on every rank, if some rank's module has a setting that cannot be supported, or if ranks differ
            in policy, world size or parameters. The message names both values.

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
        self._earlier = earlier  # from the run before a checkpoint, and from modules that this state served earlier
        self._origin = 0, Statistics()  # see `origin_of`
        self._service: Service | DisabledService | None = None  # stays here after it is closed

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._policy

    @property
    def topology(self) -> Topology | None:
        """Which ranks share a host, as of registration, and what follows from that under the policy in force.

        None if ``DDP_HOOKS_DISABLE`` is set.
        """
        return self._require_service().topology

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
        """Remove the hook from the module, which then trains as plain DDP, and close the groups that the state opened.

        Every rank calls it between two steps and waits for the others, even if its own module is gone already. The
        state keeps its policy and its statistics, and cannot be opened again. Calling it is optional: a state closes by
        itself when its module goes, without waiting for other ranks. It also closes on this rank alone if the process
        group was destroyed, or, after 5 seconds, while an exception is being handled.

        Raises:
            RuntimeError: on every rank, if a backward pass is under way on some rank.
            RanksAbsentError: some ranks did not call it within the process group's timeout. The message names them and
                says where they are; nothing has changed.
        """
        if self._service is None:
            return
        self._service.agree_to_close()
        ddp = self._service.ddp
        self._service.close()
        if ddp is not None:
            keep_place(ddp)

    def set_policy(self, policy: Policy | str, **settings: Any) -> None:
        """Change the policy between two steps. Every rank calls it with the same policy.

        Args:
            policy: as for the class.
            settings: as for the class. Other fields take the new policy's values, not those of the policy in force.

        Raises:
            TypeError, ValueError: the policy or a setting does not exist; the other ranks then raise a RuntimeError.
            RuntimeError: on every rank, if ranks differ or a backward pass is under way; or if it serves no module.
        """
        service = self._require_service()
        resolved, mistake = _resolve("set_policy", policy, settings)
        try:
            service.change_policy(resolved, _problem("set_policy", mistake))
        except RefusedError as refusal:
            raise (mistake or refusal).with_traceback(None) from refusal.__cause__
        self._policy = resolved

    def stats(self) -> Statistics:
        """Return the counters so far, including those loaded from a checkpoint."""
        return self._earlier if self._service is None else self._earlier + self._service.statistics()

    def reset_stats(self) -> None:
        """Set all counters to zero."""
        self._restart_statistics(Statistics())

    def _restart_statistics(self, earlier: Statistics) -> None:
        self._earlier, self._origin = earlier, (self._origin[0] + 1, earlier)
        if self._service is not None:
            self._service.reset_statistics()

    def usage(self) -> dict[str, ParameterUsage]:
        """Return how each parameter was used in the last step, by name.

        Returns:
            One entry for each parameter that DDP reduces, in DDP's order. Empty before the first step.
        """
        return self._require_service().usage()

    def serves(self, ddp: DistributedDataParallel) -> bool:
        """Say whether this state belongs to that module."""
        return self._service is not None and self._service.ddp is ddp

    @contextmanager
    def unused(self, *what: Selector) -> Iterator[None]:
        """Declare that forward passes in this block do not use some parameters.

        With ``find_unused_parameters=False``, DDP then neither waits for their gradients nor searches the graph, and
        parameters that no rank uses are not sent. Ranks may declare different parameters. With
        ``find_unused_parameters=True`` the declaration changes nothing, because DDP searches anyway. The block must
        contain the forward pass; backward may come later.

        Args:
            what: modules, parameters, or patterns of parameter names (as in :func:`ddp_hooks.freeze`).

        Raises:
            ValueError: a pattern matches nothing.
            RuntimeError: from ``backward()``, if a declared parameter enters the graph only during backward, as with
                reentrant checkpointing; the message names it. Any other declared parameter that is used after all gets
                the same gradient as in plain DDP.
        """
        with self._require_service().unused(*what):
            yield

    def declare_unused(self, *what: Selector) -> None:
        """Declare that the next synchronised forward pass does not use some parameters; see :meth:`unused`.

        Args:
            what: as for :meth:`unused`.

        Raises:
            ValueError, RuntimeError: as for :meth:`unused`.
        """
        self._require_service().declare_unused(*what)

    def state_dict(self) -> dict[str, Any]:
        """Return the policy and the statistics as plain values, for a checkpoint.

        :meth:`load_state_dict` restores the statistics. The policy is only a record of what the run used.
        """
        return {"version": 2, "policy": self._policy.to_dict(), "statistics": self.stats().to_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the statistics of a checkpoint. The policy in force stays.

        Nothing is sent to other ranks. A resumed run wraps the whole model, so parameters that
        :func:`ddp_hooks.rebuild` had removed from the Reducer are in it again: freeze them, and call ``rebuild`` again.

        Args:
            state_dict: the value that :meth:`state_dict` returned.

        Raises:
            TypeError, ValueError: it is something else, or comes from another version of this package.
        """
        self._restart_statistics(_read_statistics(state_dict))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle and copy the policy and the statistics only.

        DDP copies and pickles its hook's state together with the module, but the engine and the groups cannot be
        copied. A copied state serves no module, and says how to make another when it is used for more.
        """
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state that serves no module."""
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
        bucket: a bucket of gradients from DDP.

    Returns:
        A future of the bucket's buffer with averaged gradients. If it fails, ``backward()`` raises its error. It may
        complete during a later bucket, so a hook that wraps this one must not wait for it; use ``then()``.
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
        # DDP cannot replace a hook, so the way out is to wrap the model again.
        return _C.failed_future(  # type: ignore[no-any-return]
            f"skip_unused_hook: expected a SkipUnusedState that serves this module, received {received}; wrap the "
            f"model in DistributedDataParallel again, and {_MAKE_ANOTHER}"
        )
    return engine.run(bucket)


def register(ddp: torch.nn.Module, policy: Policy | str = "auto", **settings: Any) -> SkipUnusedState:
    """Register the hook natively, so that no Python runs while gradients are reduced. Every rank calls it.

    Calling it again with the same policy returns the existing state.

    Args:
        ddp: the DDP module, or the result of ``torch.compile(ddp)``.
        policy: as for :class:`SkipUnusedState`.
        settings: as for :class:`SkipUnusedState`, for example ``register(ddp, "auto", rebuild_after=100)``.

    Returns:
        The state, for statistics and usage. It sends the same bytes as a state that is registered through Python.

    Raises:
        TypeError, ValueError, RuntimeError: as for :class:`SkipUnusedState`; also if the module already has another
            hook, or this hook with another policy.
    """
    module = find_ddp(ddp, "register")
    service = service_of(module)
    state = None if service is None else service.state()
    # From here on, problems are exchanged before any rank raises, so that no rank waits for one that has raised.
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
    """Return how many times the counters were reset or loaded from a checkpoint, and their values since then."""
    return state._origin


def states() -> list[SkipUnusedState]:
    """Return the states that serve modules of this process now, in the order in which they began to.

    These come from :func:`register`, :class:`SkipUnusedState` and :func:`ddp_hooks.enable`. Closed states, and states
    whose modules are gone, are left out.
    """
    living = [state() for state in _tied]
    return [state for state in living if state is not None and state._service is not None and state._service.ddp]


def _read_statistics(state_dict: dict[str, Any]) -> Statistics:
    """Read the result of :meth:`SkipUnusedState.state_dict`; raise a TypeError or ValueError for anything else."""
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
    """Return the policy; or any policy and the mistake, so that the other ranks can be told of it."""
    try:
        return resolve(policy, settings, function), None
    except (TypeError, ValueError) as mistake:
        return PRESETS["auto"], mistake


def _problem(function: str, mistake: Exception | None) -> str | None:
    return None if mistake is None else str(mistake).removeprefix(f"{function}: ")
