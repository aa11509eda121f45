"""A DistributedDataParallel communication hook that sends only the gradients somebody needs.

::

    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    state = ddp_hooks.register(ddp)
    ...
    print(state.stats())

Where a trainer makes the module, ``ddp_hooks.enable()`` before it starts does the same for each one that is made.

Around it: freezing at any time; parameters and buffers in step without a backward pass (:mod:`ddp_hooks.sync`); who
does not use which parameters, by name (:mod:`ddp_hooks.doctor`); errors that have a name (:mod:`ddp_hooks.errors`).
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
    # `python -m ddp_hooks info` is what people call to find out why it does not load.
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

# Training with DDP does not need the doctor, so it is loaded when somebody asks for one of these; nor `fsdp`.
_OF_THE_DOCTOR = ("diagnose", "expect_unused", "expect_used")

if not TYPE_CHECKING:  # so that a type checker still finds a name that is not there

    def __getattr__(name: str) -> object:
        """Load the doctor with the first of its names that is used, and what is for FSDP2 with its own."""
        if name == "fsdp":
            return importlib.import_module(".fsdp", __name__)
        if name != "doctor" and name not in _OF_THE_DOCTOR:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        doctor = importlib.import_module(".doctor", __name__)
        return doctor if name == "doctor" else getattr(doctor, name)

    def __dir__() -> list[str]:
        """List what is loaded later, too."""
        return sorted({*globals(), "doctor", "fsdp", *_OF_THE_DOCTOR})
