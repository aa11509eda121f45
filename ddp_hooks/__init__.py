"""Synchronisation of parameters and buffers without a backward pass."""

from ._extension import load as _load

_load()

from .agreement import RanksDisagreeError  # noqa: E402
from .averagers import PeriodicModelAverager  # noqa: E402
from .buffers import BufferStatistics, BufferSync  # noqa: E402
from .replicas import ReplicaReport, ReplicasDifferError, TensorDifference, verify_replicas  # noqa: E402
from .sharing import SharedParameters, share_parameters  # noqa: E402
from .sync import SyncReport, SyncWork, average_parameters, broadcast_parameters  # noqa: E402

__all__ = [
    "BufferStatistics",
    "BufferSync",
    "PeriodicModelAverager",
    "RanksDisagreeError",
    "ReplicaReport",
    "ReplicasDifferError",
    "SharedParameters",
    "SyncReport",
    "SyncWork",
    "TensorDifference",
    "average_parameters",
    "broadcast_parameters",
    "share_parameters",
    "verify_replicas",
]
