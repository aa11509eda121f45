"""Makes tests/spawn.py and tests/training.py importable, also in the rank processes, and guards the tests on CUDA."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import pytest

_here = str(Path(__file__).parent)
sys.path.insert(0, _here)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_here, os.environ.get("PYTHONPATH", "")]))
os.environ.setdefault("OMP_NUM_THREADS", "1")


@functools.cache
def _why_no_cuda() -> str | None:
    import torch

    from ddp_hooks import _C

    if not _C.has_cuda():
        return "this build has no CUDA kernels: build with DDP_HOOKS_CUDA=1, which says what is missing"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests on CUDA where there is none; where there has to be one, fail them, so that none is left out unseen."""
    if item.get_closest_marker("cuda") is None or _why_no_cuda() is None:
        return
    if os.environ.get("DDP_HOOKS_REQUIRE_CUDA") == "1":
        pytest.fail(f"DDP_HOOKS_REQUIRE_CUDA=1, but {_why_no_cuda()}", pytrace=False)
    pytest.skip(str(_why_no_cuda()))
