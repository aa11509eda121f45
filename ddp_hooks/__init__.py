"""A DistributedDataParallel communication hook that sends only the gradients somebody needs.

::

    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    state = ddp_hooks.register(ddp)
    ...
    print(state.stats())

If a trainer makes the module, call ``ddp_hooks.enable()`` before it starts: every module made after that gets the hook.

The package also freezes parameters at any time, synchronises parameters and buffers without a backward pass
(:mod:`ddp_hooks.sync`), and names the parameters that ranks do not use (:mod:`ddp_hooks.doctor`). Its errors are in
:mod:`ddp_hooks.errors`.
"""

import importlib
import sys
from typing import TYPE_CHECKING

from . import _extension

try:
    _extension.load()
except ImportError as _error:
    if not _extension.runs_as_command():
        raise
    # People run `python -m ddp_hooks info` to find out why the package does not load.
    print(_extension.describe())
    sys.exit(_extension.fold(str(_error)))

from . import errors as errors
from . import sync as sync
from ._version import __version__
from .enabling import disable, enable
from .freezing import FreezeSchedule, freeze, rebuild, unfreeze
from .hooks import SkipUnusedState, register, skip_unused_hook, states
from .policies import Policy, Tuning

if TYPE_CHECKING:
    from . import doctor as doctor
    from . import fsdp as fsdp
    from .doctor import diagnose, expect_unused, expect_used

__all__ = [
    "FreezeSchedule",
    "Policy",
    "SkipUnusedState",
    "Tuning",
    "__version__",
    "diagnose",
    "disable",
    "enable",
    "expect_unused",
    "expect_used",
    "freeze",
    "rebuild",
    "register",
    "skip_unused_hook",
    "states",
    "unfreeze",
]

# Training with DDP needs neither the doctor nor `fsdp`, so both are loaded on first use.
_OF_THE_DOCTOR = ("diagnose", "expect_unused", "expect_used")

if not TYPE_CHECKING:  # so that a type checker still finds a name that is not there

    def __getattr__(name: str) -> object:
        """Load the doctor or ``fsdp`` when one of their names is first used."""
        if name == "fsdp":
            return importlib.import_module(".fsdp", __name__)
        if name != "doctor" and name not in _OF_THE_DOCTOR:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        doctor = importlib.import_module(".doctor", __name__)
        return doctor if name == "doctor" else getattr(doctor, name)

    def __dir__() -> list[str]:
        """List every name, including those that are loaded on first use."""
        return sorted({*globals(), "doctor", "fsdp", *_OF_THE_DOCTOR})
