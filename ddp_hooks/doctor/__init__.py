"""The doctor names parameters that are unused, frozen or zero, and tries whether ``ddp_hooks`` helps."""

from .diagnosis import Diagnosis, diagnose
from .expectations import ExpectationHandle, expect_unused, expect_used
from .findings import Findings
from .shards import ShardDiagnosis

__all__ = [
    "Diagnosis",
    "ExpectationHandle",
    "Findings",
    "ShardDiagnosis",
    "diagnose",
    "expect_unused",
    "expect_used",
]
