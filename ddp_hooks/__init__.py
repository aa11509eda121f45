"""A DistributedDataParallel communication hook that sends only the gradients somebody needs.

::

    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    state = ddp_hooks.register(ddp)
    ...
    print(state.stats())

Around it: freezing at any time, and parameters and buffers in step without a backward pass.
"""

from . import _extension

_extension.load()

from ._version import __version__  # noqa: E402
from .absentees import RanksAbsentError  # noqa: E402
from .agreement import RanksDisagreeError  # noqa: E402
from .averagers import PeriodicModelAverager  # noqa: E402
from .buffers import BufferStatistics, BufferSync  # noqa: E402
from .freezing import FreezeSchedule, freeze, rebuild, unfreeze  # noqa: E402
from .hooks import SkipUnusedState, register, skip_unused_hook  # noqa: E402
from .policies import PRESETS, Policy  # noqa: E402
from .replicas import ReplicaReport, ReplicasDifferError, TensorDifference, verify_replicas  # noqa: E402
from .sharing import SharedParameters, share_parameters  # noqa: E402
from .statistics import ParameterUsage, Statistics  # noqa: E402
from .sync import SyncReport, SyncWork, average_parameters, broadcast_parameters  # noqa: E402

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
