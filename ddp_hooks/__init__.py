"""A DistributedDataParallel communication hook that sends only the gradients somebody needs.

::

    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    state = ddp_hooks.register(ddp)
    ...
    print(state.stats())

Around it: freezing at any time, and parameters and buffers in step without a backward pass.
"""

import sys

from . import _extension

try:
    _extension.load()
except ImportError as _error:
    if not _extension.runs_as_command():
        raise
    # `python -m ddp_hooks info` is what people call to find out why it does not load.
    print(_extension.describe())
    sys.exit(str(_error))

from ._version import __version__
from .absentees import RanksAbsentError
from .agreement import RanksDisagreeError
from .freezing import FreezeSchedule, freeze, rebuild, unfreeze
from .hooks import SkipUnusedState, register, skip_unused_hook
from .policies import PRESETS, Policy
from .statistics import ParameterUsage, Statistics, UnitUsage
from .sync import (
    BufferStatistics,
    BufferSync,
    PeriodicModelAverager,
    ReplicaReport,
    ReplicasDifferError,
    SharedParameters,
    SyncReport,
    SyncWork,
    TensorDifference,
    average_parameters,
    broadcast_parameters,
    share_parameters,
    verify_replicas,
)

__all__ = [
    "PRESETS",
    "BufferStatistics",
    "BufferSync",
    "FreezeSchedule",
    "ParameterUsage",
    "PeriodicModelAverager",
    "Policy",
    "RanksAbsentError",
    "RanksDisagreeError",
    "ReplicaReport",
    "ReplicasDifferError",
    "SharedParameters",
    "SkipUnusedState",
    "Statistics",
    "SyncReport",
    "SyncWork",
    "TensorDifference",
    "UnitUsage",
    "__version__",
    "average_parameters",
    "broadcast_parameters",
    "freeze",
    "rebuild",
    "register",
    "share_parameters",
    "skip_unused_hook",
    "unfreeze",
    "verify_replicas",
]
