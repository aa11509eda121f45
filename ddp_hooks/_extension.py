"""Loads the compiled extension, or says why it cannot be loaded and what to do."""

from __future__ import annotations

import importlib
import itertools
import sys
import textwrap
import types
from pathlib import Path

from ._version import __version__, why_untested

_BUILD = "In a checkout, build it against your torch with `make build`, or with `pip install --no-build-isolation .`"
_REBUILD = (
    "In a checkout, rebuild it against the installed torch with `make build`, or with "
    "`pip install --force-reinstall --no-deps --no-build-isolation .`"
)


def load() -> types.ModuleType:
    """Import ``ddp_hooks._C`` and check that it was built for the installed torch.

    The extension reads the inside of DDP's Reducer, whose layout changes between torch versions, so it runs only with
    the very version that it was compiled against. Its local part (``+cpu``, ``+cu130``) may differ only in name: the
    same commit of torch, with the same CUDA or without. Other builds of a commit may choose other members in headers.

    Returns:
        The compiled module.

    Raises:
        ImportError: torch is not one that ddp_hooks is tested with, or the extension is missing, does not link, or was
            built for another torch or Python; the message says what was expected and received, and what to do.
    """
    torch_version = _torch_version()
    if torch_version is None:
        raise ImportError("ddp_hooks needs torch, which is not installed for this Python: `pip install torch`.")
    # First of all, because to build it beside this torch would come to nothing.
    if untested := why_untested(torch_version):
        raise ImportError(f"{untested}.")
    built_for = _built_for()
    if built_for is None:
        raise ImportError(_why_not_built())
    # Asked first, because a torch of another ABI makes the import itself fail with a linker's message.
    if torch_version != built_for and not _is_same_torch():
        raise ImportError(
            f"ddp_hooks was built for torch {built_for}, but torch {torch_version} is installed. {_REBUILD}"
        )
    try:
        return importlib.import_module(f"{__package__}._C")
    except ModuleNotFoundError as error:
        if error.name != f"{__package__}._C":
            raise
        others = ", ".join(path.name for path in sorted(Path(__file__).parent.glob("_C.*.so")))
        if not others:
            raise ImportError(_why_not_built()) from error
        raise ImportError(
            f"ddp_hooks was built for another Python: expected an extension for {sys.implementation.cache_tag}, found "
            f"{others}. {_REBUILD}"
        ) from error
    except ImportError as error:
        raise ImportError(f"ddp_hooks' compiled extension cannot be loaded: {error}. {_REBUILD}") from error


def describe() -> str:
    """Say what is installed and what the extension was built for, whether or not it loads."""
    built_for = _built_for()
    torch_version = _torch_version()
    lines = [
        f"ddp_hooks  {__version__}, {'not built' if built_for is None else f'built for torch {built_for}'}",
        f"torch      {'not installed' if torch_version is None else _describe_torch(torch_version)}",
        f"python     {sys.version.split()[0]}, {sys.executable}",
    ]
    return "\n".join(lines)


def fold(text: str) -> str:
    """Return text in lines that a terminal shows whole; words, and so names and paths, are not divided."""
    return textwrap.fill(text, 80, break_long_words=False, break_on_hyphens=False)


def runs_as_command() -> bool:
    """Say whether this is `python -m ddp_hooks`, which has to import the package before it can say anything."""
    # While Python looks for the module of -m, that stands first in the arguments.
    original = sys.orig_argv
    named = "-mddp_hooks" in original or ("-m", "ddp_hooks") in itertools.pairwise(original)
    return sys.argv[:1] == ["-m"] and named


def _why_not_built() -> str:
    here = Path(__file__).resolve().parent
    for folder in sys.path:
        other = Path(folder, here.name).resolve()
        if other != here and any(other.glob("_C.*.so")):
            return (
                f"ddp_hooks is not built here: the checkout in {here.parent} shadows the package installed in "
                f"{other.parent}. Run Python from another directory, or build the checkout as well with `make build`."
            )
    return f"ddp_hooks is not built: its compiled extension is missing. {_BUILD}"


def _built_for() -> str | None:
    try:
        version: str = importlib.import_module(f"{__package__}._build_info").TORCH_VERSION
    except ModuleNotFoundError:
        return None
    return version


def _is_same_torch() -> bool:
    import torch

    info = importlib.import_module(f"{__package__}._build_info")
    same_release = info.TORCH_VERSION.split("+")[0] == str(torch.__version__).split("+")[0]
    commit, cuda = getattr(info, "TORCH_COMMIT", None), getattr(info, "TORCH_CUDA", None)
    return same_release and commit == torch.version.git_version and cuda == torch.version.cuda


def _torch_version() -> str | None:
    try:
        import torch
    except ModuleNotFoundError:
        return None
    return str(torch.__version__)


def _describe_torch(version: str) -> str:
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return f"{version}, {cuda}; device: {device}"
