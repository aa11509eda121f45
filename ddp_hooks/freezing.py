"""Freezes and unfreezes parts of a DDP module at any time, and rebuilds its Reducer for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from . import _extension
from .serving import service
from .serving.disabling import VARIABLE, is_disabled
from .serving.modules import find_ddp, parameters_of, reducible_parameters, uncompiled
from .serving.parameters import Selector, select
from .wording import check_fields, check_flag, check_int, short, short_list

_C = _extension.load()


def freeze(
    module: nn.Module, *what: Selector, eval_norms: bool = False, keep_gradients: bool = False
) -> tuple[str, ...]:
    """Freeze parameters: they get no gradients, and with a hook of this package nothing is sent for them.

    Call it between two steps. Ranks may freeze different parameters.

    Args:
        module: the DDP module, or the model in it.
        what: patterns of parameter names as in a shell (``"encoder.*"``; ``"encoder"`` alone means all of it), modules,
            or parameters. Names are those of the wrapped model.
        eval_norms: also put normalisation layers in eval mode if all of their parameters are now frozen, so that their
            running statistics do not change. ``module.train()`` undoes that; freeze again after it.
        keep_gradients: keep the last gradients instead of dropping them. Optimizers skip parameters without a gradient;
            with one, momentum and weight decay keep changing a frozen weight.

    Returns:
        The names of the selected parameters, including those that were frozen already.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a selector matches no parameter, or none is given. Nothing has changed.
        RuntimeError: ``module`` is a DDP module that would wait for these gradients forever, because it has neither a
            hook of this package nor ``find_unused_parameters=True``. Nothing has changed.
    """
    model = _model("freeze", module)
    check_flag("freeze: eval_norms", eval_norms)
    check_flag("freeze: keep_gradients", keep_gradients)
    parameters = _selected("freeze", model, what)
    _check_not_awaited(module, parameters)
    for parameter in parameters.values():
        parameter.requires_grad_(False)
        if not keep_gradients:
            parameter.grad = None
    if eval_norms:
        for norm in _norms_of(model, parameters):
            if all(not parameter.requires_grad for parameter in norm.parameters()):
                norm.eval()
    return tuple(parameters)


def unfreeze(module: nn.Module, *what: Selector, train_norms: bool = False) -> tuple[str, ...]:
    """Unfreeze parameters: the opposite of :func:`freeze`.

    DDP does not know parameters that were frozen when it was built, or at the last :func:`rebuild`. The hook averages
    their gradients after backward, without overlap, until :func:`rebuild` adds them to the Reducer.

    Args:
        module: the DDP module, or the model in it.
        what: as for :func:`freeze`.
        train_norms: also put normalisation layers among them in train mode.

    Returns:
        The names of the selected parameters.

    Raises:
        TypeError, ValueError: as for :func:`freeze`; also if a parameter's dtype has no gradients.
    """
    model = _model("unfreeze", module)
    check_flag("unfreeze: train_norms", train_norms)
    parameters = _selected("unfreeze", model, what)
    _check_trainable(parameters)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    if train_norms:
        for norm in _norms_of(model, parameters):
            norm.train()
    return tuple(parameters)


class FreezeSchedule:
    """Freezes and unfreezes parts of a module at given steps.

    Args:
        module: the DDP module, or the model in it.
        freeze: for each step, counted from 0, the selectors to freeze before it: a pattern, module or parameter as for
            :func:`freeze`, or a list of them. Optional if ``unfreeze`` is given.
        unfreeze: for each step, the selectors to unfreeze before it. If a step has both, unfreezing comes first.
        eval_norms: as for :func:`freeze`; unfreezing puts those layers back in train mode.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a step is negative, a pattern matches nothing, or there is no step. Raised here, before any step.

    Example::

        schedule = ddp_hooks.FreezeSchedule(ddp, {1000: "embedding", 2000: ["layers.0", "layers.1"]})
        for batch in loader:
            schedule.step()
            ...
    """

    def __init__(
        self,
        module: nn.Module,
        freeze: Mapping[int, Selector | Sequence[Selector]] | None = None,
        unfreeze: Mapping[int, Selector | Sequence[Selector]] | None = None,
        *,
        eval_norms: bool = False,
    ) -> None:
        model = _model("FreezeSchedule", module)
        check_flag("eval_norms", eval_norms)
        self._module = module
        self._freeze = _by_step(model, "freeze", freeze)
        self._unfreeze = _by_step(model, "unfreeze", unfreeze)
        if not self._freeze and not self._unfreeze:
            raise ValueError(
                "FreezeSchedule: expected something to freeze or unfreeze, received no steps; for example, "
                "pass freeze={1000: 'encoder'}"
            )
        for what in self._unfreeze.values():
            _check_trainable(_selected("FreezeSchedule", model, what))
        self._eval_norms = eval_norms
        self._next_step = 0

    def step(self) -> tuple[str, ...]:
        """Freeze and unfreeze what is due before the next step. Every rank calls it once per step.

        Returns:
            The names of the parameters that were frozen or unfrozen.

        Raises:
            ValueError: the module has changed and a pattern matches nothing any more. Nothing has changed.
            RuntimeError: as for :func:`freeze`. Nothing has changed.
        """
        self._check([self._next_step])
        changed = self._do(self._next_step)
        self._next_step += 1
        return changed

    def _check(self, steps: Sequence[int]) -> None:
        """Raise the error that these steps, in order, would raise, before any of them is done."""
        model = _model("FreezeSchedule", self._module)
        frozen: dict[str, nn.Parameter] = {}
        unfrozen: dict[str, nn.Parameter] = {}
        for step in steps:
            if step in self._unfreeze:
                chosen = _selected("FreezeSchedule", model, self._unfreeze[step])
                _check_trainable(chosen)
                unfrozen |= chosen
                frozen = {name: parameter for name, parameter in frozen.items() if name not in chosen}
            if step in self._freeze:
                frozen |= _selected("FreezeSchedule", model, self._freeze[step])
        # What matters is the outcome of all steps: a parameter may be unfrozen and then frozen again.
        _check_not_awaited(self._module, frozen, unfrozen)

    def _do(self, step: int) -> tuple[str, ...]:
        changed: tuple[str, ...] = ()
        if step in self._unfreeze:
            changed += unfreeze(self._module, *self._unfreeze[step], train_norms=self._eval_norms)
        if step in self._freeze:
            # On the model, because what DDP waits for was checked for all steps together.
            model = _model("FreezeSchedule", self._module)
            changed += freeze(model, *self._freeze[step], eval_norms=self._eval_norms)
        return changed

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps so far, for a checkpoint."""
        return {"next_step": self._next_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint: repeat everything that was due before, in order.

        Args:
            state_dict: the value that :meth:`state_dict` returned.

        Raises:
            TypeError: it is not a dictionary, or the step is not an int.
            ValueError: it has other fields or a negative step, or a pattern matches nothing any more. Nothing has
                changed.
            RuntimeError: as for :func:`freeze`. Nothing has changed.
        """
        check_fields("FreezeSchedule.load_state_dict", state_dict, ("next_step",), ("next_step",))
        next_step = state_dict["next_step"]
        check_int("FreezeSchedule.load_state_dict: next_step", next_step, 0)
        due = [step for step in sorted({*self._freeze, *self._unfreeze}) if step < next_step]
        self._check(due)
        for step in due:
            self._do(step)
        self._next_step = next_step


def rebuild(ddp: DistributedDataParallel, *, find_unused_parameters: bool | None = None) -> bool:
    """Rebuild DDP's Reducer in place for the parameters that require gradients now. Every rank calls it.

    The wrapper, the hook, its statistics and the optimizer stay. A step then costs as much as with a DDP that was built
    with those parameters frozen: their buckets are gone. Parameters that only some ranks have frozen stay in the
    Reducer. Call it between two steps.

    Args:
        ddp: a module with a hook of this package, which may be wrapped in a hook of yours.
        find_unused_parameters: a new value for this setting of DDP. False avoids the search of the graph, if every
            unused parameter is frozen now. None keeps the current value.

    Returns:
        Whether anything changed. False if ``DDP_HOOKS_DISABLE`` is set.

    Raises:
        RuntimeError: on every rank, if a backward pass is under way, no parameter requires a gradient on any rank, or
            ranks ask for different settings. Also if no hook of this package is registered.

    Source:
        ``DistributedDataParallel.__setstate__`` builds a Reducer in the same way after unpickling.
    """
    module = find_ddp(ddp, "rebuild")
    return False if is_disabled() else service.rebuild(module, find_unused_parameters)


def _model(function: str, module: nn.Module) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{function}: expected a DDP module or the model in it, received {short(module)}")
    inner = uncompiled(module)
    return inner.module if isinstance(inner, DistributedDataParallel) else module


def _selected(function: str, model: nn.Module, what: Sequence[Selector]) -> dict[str, nn.Parameter]:
    if not what:
        raise ValueError(f"{function}: expected patterns, modules or parameters, received none; '*' means all of them")
    return select(function, model, *what)


def _check_not_awaited(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], unfrozen: Mapping[str, nn.Parameter] | None = None
) -> None:
    """Refuse to freeze parameters that plain DDP waits for; ``unfrozen`` are those that will be trained by then."""
    ddp = uncompiled(module)
    if not isinstance(ddp, DistributedDataParallel) or ddp.find_unused_parameters or service.is_served(ddp):
        return
    if not ddp.require_backward_grad_sync:
        return  # within no_sync(), and may be unfrozen before the next synchronised pass
    if ddp.static_graph and _C.reducer_forward_passes(ddp.reducer) == 0:
        return  # a static graph learns in its first pass which parameters are unused
    awaited = {id(parameter) for parameter in parameters_of(ddp)[0]}
    names = [
        name
        for name, parameter in parameters.items()
        if id(parameter) in awaited and (parameter.requires_grad or name in (unfrozen or {}))
    ]
    frozen = {id(parameter) for parameter in parameters.values()}
    trained = {id(parameter) for parameter in reducible_parameters(ddp).values() if parameter.requires_grad}
    trained |= {id(parameter) for parameter in (unfrozen or {}).values()}
    # If nothing is trained, DDP waits for nothing: a discriminator may be frozen for its generator's pass.
    if names and awaited & (trained - frozen):
        raise RuntimeError(
            "freeze: expected a module with a hook of this package or with find_unused_parameters=True, received one "
            f"with neither. If {short_list(names)} stay frozen in the next reduced pass, DDP waits for their gradients "
            "and raises 'Expected to have finished reduction' in the pass after it. Call ddp_hooks.register(ddp) "
            "first, wrap with find_unused_parameters=True, or freeze before wrapping"
            + (f". {VARIABLE} is set, so register() has no effect now" if is_disabled() else "")
        )


def _check_trainable(parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise ValueError(
                f"expected parameters that can have a gradient, but {name} has dtype {parameter.dtype}; leave it out"
            )


def _norms_of(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[_NormBase]:
    """Find norms with a chosen parameter, and norms without parameters in a module whose parameters are all chosen."""
    chosen = {id(parameter) for parameter in parameters.values()}
    found: dict[nn.Module, None] = {}

    def look_in(module: nn.Module, all_chosen: bool) -> None:
        own = [id(parameter) in chosen for parameter in module.parameters()]
        all_chosen = all(own) if own else all_chosen
        if isinstance(module, _NormBase) and (any(own) if own else all_chosen):
            found[module] = None
        for child in module.children():
            look_in(child, all_chosen)

    look_in(model, False)
    return iter(found)  # type: ignore[arg-type]


def _by_step(
    model: nn.Module, argument: str, schedule: Mapping[int, Selector | Sequence[Selector]] | None
) -> dict[int, tuple[Selector, ...]]:
    if schedule is None:
        return {}
    if not isinstance(schedule, Mapping):
        raise TypeError(
            f"FreezeSchedule: expected {argument} to be a dictionary that maps steps to patterns, as in "
            f"{{1000: 'encoder'}}, received {short(schedule)}"
        )
    result: dict[int, tuple[Selector, ...]] = {}
    for step, what in schedule.items():
        check_int(f"each step in FreezeSchedule's {argument}", step, 0)
        alone = isinstance(what, (str, nn.Module, torch.Tensor)) or not isinstance(what, Iterable)
        result[step] = (what,) if alone else tuple(what)  # type: ignore[assignment, arg-type]
        _selected("FreezeSchedule", model, result[step])
    return result
