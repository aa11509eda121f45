"""Loads the compiled extension, or says why it cannot be loaded and what to do."""

from __future__ import annotations

import types

import torch

_REBUILD = (
    "Rebuild it against the torch that is installed: "
    "`pip install --force-reinstall --no-deps --no-build-isolation ddp_hooks` (or `.` in a checkout)."
)


def load() -> types.ModuleType:
    """Import ``ddp_hooks._C`` and check that it was built for the installed torch.

    The extension reads the inside of DDP's Reducer, whose layout changes between torch versions, so it runs only with
    the very version that it was compiled against.

    Returns:
        The compiled module.

    Raises:
        ImportError: the extension is missing, does not link, or was built for another torch; the message says which
            versions were expected and received, and how to rebuild.
    """
    # Asked first, because a torch of another ABI makes the import itself fail with a linker's message.
    from . import _build_info

    if torch.__version__ != _build_info.TORCH_VERSION:
        raise ImportError(
            f"ddp_hooks was built for torch {_build_info.TORCH_VERSION}, but torch {torch.__version__} is installed. "
            + _REBUILD
        )
    try:
        from . import _C
    except ImportError as error:
        raise ImportError(f"ddp_hooks' compiled extension cannot be loaded: {error}. {_REBUILD}") from error
    return _C
