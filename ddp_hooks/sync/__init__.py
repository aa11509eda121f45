"""Synchronises parameters, buffers and gradients across ranks without a backward pass. Needs no hook."""

from .averagers import PeriodicModelAverager
from .buffers import BufferMode, BufferStatistics, BufferSync
from .parameters import BufferTreatment, average_parameters, broadcast_parameters
from .replicas import ReplicaReport, TensorDifference, verify_replicas
from .sharing import SharedParameters, share_parameters
from .work import SyncReport, SyncWork

__all__ = [
    "BufferMode",
    "BufferStatistics",
    "BufferSync",
    "BufferTreatment",
    "PeriodicModelAverager",
    "ReplicaReport",
    "SharedParameters",
    "SyncReport",
    "SyncWork",
    "TensorDifference",
    "average_parameters",
    "broadcast_parameters",
    "share_parameters",
    "verify_replicas",
]
