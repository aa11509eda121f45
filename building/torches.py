"""The torches that extensions are compiled against: folders with headers and libraries, which are never imported."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import runpy
from dataclasses import dataclass
from pathlib import Path

# In these, builds of the same sources differ: by their version, and by whether they have CUDA.
BUILD_HEADERS = ("torch/headeronly/version.h", "caffe2/core/macros.h")
LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")


@dataclass(frozen=True, slots=True)
class Torch:
    """A torch that an extension can be compiled against."""

    folder: Path  # of the package
    version: str  # without its local part
    commit: str

    @property
    def include_folders(self) -> list[Path]:
        """Return where its headers are."""
        include = self.folder / "include"
        return [include, include / "torch" / "csrc" / "api" / "include"]

    @property
    def label(self) -> str:
        """Return what the names of files call it. A version has no underscores, and a module's name no dots."""
        return f"{self.version.replace('.', '_')}-{self.commit[:12]}"

    def digest_headers(self) -> str:
        """Return a hash of all headers that extensions can see, but for those that name the build."""
        digest = hashlib.sha256()
        include = self.folder / "include"
        for path in sorted(include.rglob("*")):
            name = path.relative_to(include).as_posix()
            if path.is_file() and name not in BUILD_HEADERS:
                digest.update(f"{name}\n".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


def read(folder: Path) -> Torch:
    """Describe the torch whose package is in ``folder``."""
    facts = runpy.run_path(str(folder / "version.py"))
    return Torch(folder, facts["__version__"].partition("+")[0], facts.get("git_version") or "unknown")


def find() -> list[Torch]:
    """Return those that DDP_HOOKS_TORCHES names, or the installed one; none if there is none."""
    if named := os.environ.get("DDP_HOOKS_TORCHES"):
        return [read(Path(folder)) for folder in named.split(os.pathsep)]
    spec = importlib.util.find_spec("torch")
    folders = spec.submodule_search_locations if spec is not None else None
    return [read(Path(folders[0]))] if folders else []


def group(torches: list[Torch]) -> list[list[Torch]]:
    """Put releases of one minor version together if they have the same headers: one extension serves them."""
    if len(torches) == 1:
        return [torches]
    groups: dict[tuple[str, str], list[Torch]] = {}
    for torch in torches:
        groups.setdefault((torch.version.rpartition(".")[0], torch.digest_headers()), []).append(torch)
    return list(groups.values())
