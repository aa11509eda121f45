"""The hook, its state, and the ways to register it.

There is no ``from __future__ import annotations`` here: DDP compares the annotations of a hook as objects.
"""

import hashlib
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from . import _extension
from ._version import __version__
from .policies import Policy, resolve
from .statistics import ParameterUsage, Statistics

_C = _extension.load()

_VALUES_DETECTOR = {
    "off": _C.ValuesDetector.OFF,
    "on": _C.ValuesDetector.ON,
    "adaptive": _C.ValuesDetector.ADAPTIVE,
}


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
        self._start(resolve(policy), Statistics())
        self.bind(ddp)

    def _start(self, policy: Policy, earlier: Statistics) -> None:
        self._policy = policy
        self._earlier = earlier  # statistics of an earlier run that this state goes on from
        self._engine: Any = None
        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        self._names: list[str] = []
        self._control_group: Any = None

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
        self._bind(ddp, native=False)

    def _bind(self, ddp: DistributedDataParallel, *, native: bool) -> None:
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
        problem = _why_unsupported(ddp)
        group = _make_control_group(ddp)
        parameters: list[torch.Tensor] = []
        engine: Any = None
        if problem is None:
            parameters = _C.reducer_parameters(ddp.reducer)
            names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
            self._names = [names.get(id(parameter), f"#{i}") for i, parameter in enumerate(parameters)]
            engine = _C.Engine(
                reducer=ddp.reducer,
                control_group=group,
                settings=_engine_settings(self._policy, _describe(self._policy, ddp, parameters)),
                names=self._names,
            )
            if native:
                try:
                    engine.register_natively(ddp.reducer)
                except RuntimeError as error:
                    problem = f"the hook cannot be registered: {error}"
        _agree(group, _describe(self._policy, ddp, parameters), problem)
        self._control_group = group
        self._engine = engine
        self._ddp = weakref.ref(ddp)
        ddp.register_forward_hook(self._watch_outputs)

    def _watch_outputs(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        # A compiled forward starts the exchange with its first bucket instead: hooks on its outputs break its graph.
        if self._engine is None or torch.compiler.is_compiling():
            return
        if torch.is_grad_enabled() and module.require_backward_grad_sync:
            self._engine.watch_outputs(list(_find_tensors(output)))  # type: ignore[no-untyped-call]

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
            RuntimeError: on every rank, when ranks differ; or the state serves no module, or a backward pass is under
                way.
        """
        ddp = self._require_module()
        policy = resolve(policy)
        description = _describe(policy, ddp, _C.reducer_parameters(ddp.reducer))
        _agree(self._control_group, description, None)
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
        ddp = self._require_module()
        here, anywhere = self._engine.usage()
        if len(here) == 0:
            return {}
        parameters = _C.reducer_parameters(ddp.reducer)
        return {
            name: ParameterUsage(name, parameter.numel(), here.test(i), anywhere.test(i), not parameter.requires_grad)
            for i, (name, parameter) in enumerate(zip(self._names, parameters, strict=True))
        }

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
        self._start(Policy(**state["policy"]), Statistics(**state["statistics"]))

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
    state._start(resolve(policy), Statistics())
    state._bind(ddp, native=True)
    # What DDP notes of a hook that is registered through it.
    ddp._comm_hooks.append((skip_unused_hook, state))
    if ddp.logger is not None:
        ddp.logger._set_comm_hook_name(skip_unused_hook.__qualname__)
    return state


def _engine_settings(policy: Policy, description: dict[str, str]) -> Any:
    digest = hashlib.blake2b(repr(sorted(description.items())).encode(), digest_size=8).digest()
    return _C.EngineSettings(
        graph_detector=policy.graph,
        values_detector=_VALUES_DETECTOR[policy.values],
        plan=_C.PlanSettings(
            in_place_bytes=policy.in_place_bytes, pack_bytes=policy.pack_bytes, gap_fraction=policy.gap_fraction
        ),
        probe=_C.ProbeSettings(
            min_zero_fraction=policy.min_zero_fraction,
            hold_steps=policy.hold_steps,
            first_pause_steps=policy.first_pause_steps,
            longest_pause_steps=policy.longest_pause_steps,
        ),
        configuration=int.from_bytes(digest, "little"),
    )


def _why_unsupported(ddp: DistributedDataParallel) -> str | None:
    """Say what about the module cannot be supported, and the way out; None if all is well."""
    if getattr(ddp, "_delay_all_reduce_all_params", False):
        return "delay_all_reduce_named_params delays every parameter, which leaves nothing for a hook; do not set it"
    if getattr(ddp, "_use_python_reducer", False):
        return (
            "DDP's Python reducer (compiled autograd) has no buckets for a hook; set "
            "torch._dynamo.config.optimize_ddp = True before wrapping the module"
        )
    if ddp.mixed_precision is not None:
        return "DDP(mixed_precision=...) registers a hook of its own; use torch.autocast instead"
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.module.parameters()):
        return (
            "an optimizer applied in backward makes DDP register a hook of its own; step the optimizer after backward"
        )
    if _C.reducer_skips_unused_by_local_list(ddp.reducer):
        return (
            "DDP(skip_all_reduce_unused_params=True) decides from each rank's own list, keeps buckets from the hook "
            "and hangs when ranks differ; remove it, this hook does it by agreement"
        )
    if _C.reducer_is_in_backward(ddp.reducer):
        return "a backward pass is under way; make the state before backward() begins"
    return None


def _make_control_group(ddp: DistributedDataParallel) -> Any:
    # Only the members call it, so that modules on different subgroups of the world do not wait for each other.
    return dist.new_group(
        ranks=dist.get_process_group_ranks(ddp.process_group),
        backend="gloo",
        timeout=_timeout_of(ddp),
        use_local_synchronization=True,
        group_desc="ddp_hooks_control",
    )


def _timeout_of(ddp: DistributedDataParallel) -> timedelta | None:
    """Return the data group's timeout, so that a lost rank is noticed as soon here as there."""
    options = getattr(ddp.process_group._get_backend(ddp.device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def _describe(policy: Policy, ddp: DistributedDataParallel, parameters: list[torch.Tensor]) -> dict[str, str]:
    """Describe what every rank has to have in common."""
    return {
        "ddp_hooks": __version__,
        "torch": torch.__version__,
        "policy": repr(policy),
        "world size": str(dist.get_world_size(ddp.process_group)),
        "parameters": f"{len(parameters)} of {sum(parameter.numel() for parameter in parameters)} elements",
        "find_unused_parameters": str(ddp.find_unused_parameters),
        "static_graph": str(ddp.static_graph),
    }


def _agree(group: Any, description: dict[str, str], problem: str | None) -> None:
    """Raise on every rank if any rank has a problem or describes itself differently."""
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (description, problem), group=group)
    problems = [f"rank {rank}: {answer[1]}" for rank, answer in enumerate(answers) if answer[1] is not None]
    if problems:
        raise RuntimeError(f"ddp_hooks: this DistributedDataParallel module cannot be served: {'; '.join(problems)}")
    differences = []
    for key, expected in answers[0][0].items():
        for rank, (received, _) in enumerate(answers):
            if received[key] != expected:
                differences.append(f"{key}: expected {expected} as on rank 0, received {received[key]} on rank {rank}")
    if differences:
        raise RuntimeError(
            f"ddp_hooks: the ranks disagree: {'; '.join(differences)}. Pass the same module and policy on every rank"
        )
