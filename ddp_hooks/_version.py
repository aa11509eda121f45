"""The version of ddp_hooks and the tested releases of torch, which are written nowhere else.

Read by setup.py before anything is built, so it imports nothing but the standard library.
"""

from __future__ import annotations

import os

__version__ = "0.1.0"

# `make wheels` builds for each of these, and `make matrix` tests with each, oldest first. In between, other patch
# releases are taken when it is built from source.
TESTED_TORCH = ("2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0")


def why_untested(torch_version: str) -> str | None:
    """Say that a torch is outside of what is tested, and what to do; None if it is not, or its user wants to try.

    Args:
        torch_version: as ``torch.__version__`` has it.
    """
    oldest, newest = _minor(TESTED_TORCH[0]), _minor(TESTED_TORCH[-1])
    if oldest <= _minor(torch_version) <= newest or os.environ.get("DDP_HOOKS_ANY_TORCH") == "1":
        return None
    return (
        f"ddp_hooks {__version__} expects torch {_text(oldest)} to {_text(newest)}, with which it is tested, but found "
        f"torch {torch_version}. It relies on DDP internals that may differ in this version. Install a tested version, "
        "look for a newer ddp_hooks, or set DDP_HOOKS_ANY_TORCH=1 to build and import it anyway"
    )


def torch_requirement() -> str:
    """Return the range for package metadata, as in ``torch>=2.11,<2.14``."""
    oldest, (major, minor) = _minor(TESTED_TORCH[0]), _minor(TESTED_TORCH[-1])
    return f"torch>={_text(oldest)},<{major}.{minor + 1}"


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _text(minor: tuple[int, int]) -> str:
    return f"{minor[0]}.{minor[1]}"
