"""Make torch know the device "pretend", and process groups whose collectives are put on a stream of it.

See queues.h. For the whole process, and only once; tests run it in ranks of their own.
"""

from __future__ import annotations

import atexit
import types
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_hooks import _C
from ddp_hooks_testing import _pretend

torch.utils.rename_privateuse1_backend("pretend")


def _make_module() -> types.ModuleType:
    module = types.ModuleType("torch.pretend")
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: _pretend.synchronize(),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "Stream": torch.Stream,
        "Event": torch.Event,
        "current_stream": torch.accelerator.current_stream,
        "stream": lambda stream: stream,  # which is a context
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


torch._register_device_module("pretend", _make_module())
torch.utils.generate_methods_for_privateuse1_backend()


def _make_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return _pretend.make_group(dist.ProcessGroupGloo(store, rank, size, timeout))


def _make_host_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return _pretend.make_host_group(dist.ProcessGroupGloo(store, rank, size, timeout))


dist.Backend.register_backend("pretend", _make_group, devices=["pretend"])
dist.Backend.register_backend("pretend_host", _make_host_group, devices=["pretend"])
_C.register_device_kernels(torch.device("pretend"), _pretend.kernels())
atexit.register(_pretend.stop)
