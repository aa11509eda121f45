"""A DistributedDataParallel communication hook that sends only the gradients somebody needs.

::

    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    state = ddp_hooks.register(ddp)
    ...
    print(state.stats())

Where a trainer makes the module, ``ddp_hooks.enable()`` before it starts does the same for each one that is made.

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
    sys.exit(_extension.fold(str(_error)))

from ._version import __version__
from .absentees import RanksAbsentError
from .agreement import RanksDisagreeError, RefusedError
from .doctor import (
    Diagnosis,
    ExpectationHandle,
    Findings,
    UnexpectedUseError,
    diagnose,
    expect_unused,
    expect_used,
)
from .enabling import disable, enable
from .freezing import FreezeSchedule, freeze, rebuild, unfreeze
from .hooks import SkipUnusedState, register, skip_unused_hook, states
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
    "Diagnosis",
    "ExpectationHandle",
    "Findings",
    "FreezeSchedule",
    "ParameterUsage",
    "PeriodicModelAverager",
    "Policy",
    "RanksAbsentError",
    "RanksDisagreeError",
    "RefusedError",
    "ReplicaReport",
    "ReplicasDifferError",
    "SharedParameters",
    "SkipUnusedState",
    "Statistics",
    "SyncReport",
    "SyncWork",
    "TensorDifference",
    "UnexpectedUseError",
    "UnitUsage",
    "__version__",
    "average_parameters",
    "broadcast_parameters",
    "diagnose",
    "disable",
    "enable",
    "expect_unused",
    "expect_used",
    "freeze",
    "rebuild",
    "register",
    "share_parameters",
    "skip_unused_hook",
    "states",
    "unfreeze",
    "verify_replicas",
]
