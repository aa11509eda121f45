"""A DistributedDataParallel communication hook that sends only the gradients somebody needs.

::

    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    state = ddp_hooks.register(ddp)
    ...
    print(state.stats())
"""

from ._version import __version__
from .freezing import FreezeSchedule, freeze, rebuild, unfreeze
from .hooks import SkipUnusedState, register, skip_unused_hook
from .policies import PRESETS, Policy
from .statistics import ParameterUsage, Statistics

__all__ = [
    "PRESETS",
    "FreezeSchedule",
    "ParameterUsage",
    "Policy",
    "SkipUnusedState",
    "Statistics",
    "__version__",
    "freeze",
    "rebuild",
    "register",
    "skip_unused_hook",
    "unfreeze",
]
