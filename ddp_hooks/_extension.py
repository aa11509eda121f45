"""Loads the compiled extension that fits the installed torch, or says why there is none and what to do."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import struct
import sys
import textwrap
import types
from dataclasses import dataclass
from pathlib import Path

from ._version import __version__, why_untested

_BUILD = "In a checkout, build it against your torch with `make build`, or with `pip install --no-build-isolation .`"
_REBUILD = (
    "build ddp_hooks against the installed torch, in a checkout: `make build`, or "
    "`pip install --force-reinstall --no-cache-dir --no-deps --no-build-isolation .`"
)
_REINSTALL = (
    f"If the file is damaged, reinstall ddp_hooks with `pip install --force-reinstall --no-deps`; or {_REBUILD}"
)


@dataclass(frozen=True, slots=True)
class _File:
    """A compiled extension. Its name says which builds of torch it serves (building/torches.py writes it)."""

    path: Path
    builds: tuple[tuple[str, str], ...]  # versions and the beginnings of their commits

    def serves(self, version: str, commit: str) -> bool:
        return any(version == each and commit.startswith(beginning) for each, beginning in self.builds)


def load(package: str = __package__, folder: Path | None = None) -> types.ModuleType:
    """Import ``_C`` of a package, by default of ``ddp_hooks``, as it was compiled for the installed torch.

    The extension reads the inside of DDP's Reducer, whose layout changes between torch versions, so it runs only with
    the very version that it was compiled against: the same commit, for whichever CUDA, or none, that was built.

    Args:
        package: whose ``_C`` it is.
        folder: where the package is; needed if it is not ``ddp_hooks``.

    Returns:
        The compiled module.

    Raises:
        ImportError: torch is not one that ddp_hooks is tested with, or no extension was built for it and for this
            Python, or it does not link; the message says what was expected and received, and what to do.
    """
    name = f"{package}._C"
    if name in sys.modules:
        return sys.modules[name]
    installed = _installed_torch()
    if installed is None:
        raise ImportError("ddp_hooks needs torch, which is not installed for this Python: `pip install torch`.")
    # First of all, because to build it beside this torch would come to nothing.
    if untested := why_untested(installed[0]):
        raise ImportError(f"{untested}.")
    folder = folder or Path(__file__).resolve().parent
    files = _find_files(folder)
    fitting = [file for file in files if file.serves(*installed)]
    if not fitting:
        raise ImportError(_why_none_fits(folder, files, installed))
    path = fitting[0].path
    if not _is_whole(path):
        raise ImportError(f"ddp_hooks' compiled extension cannot be loaded: {path} is truncated. {_REINSTALL}.")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    except ImportError as error:
        sys.modules.pop(name, None)
        raise ImportError(f"ddp_hooks' compiled extension cannot be loaded: {error}. {_REINSTALL}.") from error
    setattr(sys.modules[package], "_C", module)  # noqa: B010
    return module


def describe() -> str:
    """Say what is installed and what the extensions were built for, whether or not one loads."""
    torches = _name_torches(_find_files(Path(__file__).resolve().parent))
    installed = _installed_torch()
    lines = [
        f"ddp_hooks  {__version__}, {f'for torch {torches}' if torches else 'not built'}",
        f"torch      {'not installed' if installed is None else _describe_torch()}",
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


def _is_whole(path: Path) -> bool:
    """Say whether an ELF file has its section headers, which come last: the linker would crash on half a file."""
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or not header.startswith(b"\x7fELF\x02"):
        return True  # the linker says what is wrong with that
    (sections,) = struct.unpack_from("<Q", header, 40)
    size, count = struct.unpack_from("<HH", header, 58)
    return path.stat().st_size >= int(sections) + int(size) * int(count)


def _find_files(folder: Path, suffix: str = importlib.machinery.EXTENSION_SUFFIXES[0]) -> list[_File]:
    files = []
    for path in sorted(folder.glob(f"_C-*{suffix}")):
        words = path.name.removesuffix(suffix).split("-")[1:]
        builds = [(version.replace("_", "."), commit) for version, commit in itertools.pairwise(words)][::2]
        files.append(_File(path, tuple(builds)))
    return files


def _name_torches(files: list[_File]) -> str:
    return ", ".join(version for file in files for version, _ in file.builds)


def _why_none_fits(folder: Path, files: list[_File], installed: tuple[str, str]) -> str:
    if not files:
        return _why_none_is_here(folder)
    version, commit = installed
    same_version = [each for file in files for each in file.builds if each[0] == version]
    if same_version:
        return (
            f"ddp_hooks was built for torch {_name_torches(files)}, of {version} commit {same_version[0][1]}, but "
            f"another build of that version is installed, of commit {commit[:12]}. Either install the release of "
            f"{version} from PyPI or pytorch.org, or {_REBUILD}."
        )
    return (
        f"ddp_hooks was built for torch {_name_torches(files)}, but torch {version} is installed. "
        f"Either install one of these versions, or {_REBUILD}."
    )


def _why_none_is_here(folder: Path) -> str:
    others = ", ".join(path.name for path in sorted(folder.glob("_C-*.so")))
    if others:
        return (
            f"ddp_hooks was built for another Python: expected an extension for {sys.implementation.cache_tag}, found "
            f"{others}. Install the wheel for this Python, or {_REBUILD}."
        )
    for entry in sys.path:
        other = Path(entry, folder.name).resolve()
        if other != folder and any(other.glob("_C-*.so")):
            return (
                f"ddp_hooks is not built here: the checkout in {folder.parent} shadows the package installed in "
                f"{other.parent}. Run Python from another directory, or build the checkout as well with `make build`."
            )
    return f"ddp_hooks is not built: its compiled extension is missing. {_BUILD}"


def _installed_torch() -> tuple[str, str] | None:
    try:
        import torch
    except ModuleNotFoundError:
        return None
    return str(torch.__version__).partition("+")[0], str(torch.version.git_version or "unknown")


def _describe_torch() -> str:
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return f"{torch.__version__}, {cuda}; device: {device}"
