"""What is distributed says the truth about itself: what it holds, what it requires, what it needs to be built."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from commands import run_captured

import ddp_hooks
from ddp_hooks import _C
from ddp_hooks._version import TESTED_TORCH

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 300


def run_setup(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_captured(
        [sys.executable, "setup.py", "--quiet", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=TIMEOUT_SECONDS,
    )


def test_what_is_installed_requires_a_tested_torch() -> None:
    installed = importlib.metadata.distribution("ddp_hooks")
    assert "torch<2.16,>=2.11" in (installed.requires or [])
    assert installed.version == ddp_hooks.__version__


def test_the_extension_needs_no_newer_system_than_torch() -> None:
    """As far back as torch's own wheels: manylinux_2_28."""
    assert _C.__file__ is not None
    symbols = subprocess.run(["readelf", "-W", "--dyn-syms", _C.__file__], capture_output=True, text=True, check=True)
    for library, newest in (("GLIBC", (2, 28)), ("GLIBCXX", (3, 4, 24)), ("CXXABI", (1, 3, 11))):
        needed = re.findall(rf"(\S+)@{library}_([\d.]+)", symbols.stdout)
        assert needed
        late = [name for name, version in needed if tuple(map(int, version.split("."))) > newest]
        assert late == [], late


@pytest.fixture(scope="module")
def source_distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    done = run_setup("egg_info", "--egg-base", str(folder), "sdist", "--dist-dir", str(folder))
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.tar.gz"))


def test_the_source_distribution_has_all_sources(source_distribution: Path) -> None:
    assert source_distribution.name == f"ddp_hooks-{ddp_hooks.__version__}.tar.gz"
    with tarfile.open(source_distribution) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        requirements = archive.extractfile(f"ddp_hooks-{ddp_hooks.__version__}/PKG-INFO")
        assert requirements is not None
        assert b"Requires-Dist: torch<2.16,>=2.11" in requirements.read()
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    sources |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "ddp_hooks").rglob("*.py*") if path.is_file()}
    sources |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "building").rglob("*.py")}
    built = {name for name in sources if "__pycache__" in name}
    assert sources - built <= names, sorted(sources - built - names)
    assert not built & names
    assert not [name for name in names if name.endswith(".so") or name.startswith(("build/", "examples/"))]


def test_without_torch_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    done = run_setup("bdist_wheel", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.strip().startswith("ddp_hooks: expected torch where this is built, found none.")
    assert "--no-build-isolation" in done.stderr
    # With isolation pip installs what is named there, and torch would be gigabytes.
    assert '"torch' not in (ROOT / "pyproject.toml").read_text().split("[project]")[0]


@pytest.fixture
def for_older_torch(tmp_path: Path) -> Path:
    """Copy what setup.py reads before it builds, as of a time at which there was no such torch as here."""
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "ddp_hooks", checkout / "ddp_hooks", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copytree(ROOT / "building", checkout / "building")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout / name)
    version = checkout / "ddp_hooks" / "_version.py"
    version.write_text(re.sub(r"TESTED_TORCH = \(.+\)", 'TESTED_TORCH = ("1.7.1", "1.9.0")', version.read_text()))
    return checkout


def test_beside_an_untested_torch_pip_says_what_to_do(for_older_torch: Path) -> None:
    done = run_captured(
        [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--dry-run", "."],
        cwd=for_older_torch,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 1
    said = done.stdout + done.stderr
    release = torch.__version__.partition("+")[0]
    assert f"expects torch 1.7 to 1.9, with which it is tested, but found torch {release}" in said
    assert "DDP_HOOKS_ANY_TORCH=1" in said


@pytest.mark.thorough
def test_an_untested_torch_can_be_built_for(for_older_torch: Path) -> None:
    asking = [sys.executable, "setup.py", "--quiet", "dist_info"]
    for wish, returncode in (("0", 1), ("1", 0)):
        environment = {**os.environ, "DDP_HOOKS_ANY_TORCH": wish}
        done = run_captured(asking, cwd=for_older_torch, env=environment)
        assert done.returncode == returncode, done.stderr


def test_readme_names_the_torches_that_are_taken() -> None:
    oldest, newest = (version.rpartition(".")[0] for version in (TESTED_TORCH[0], TESTED_TORCH[-1]))
    assert f"torch {oldest} to {newest}" in (ROOT / "README.md").read_text()


def test_without_a_compiler_it_says_which() -> None:
    done = run_setup("bdist_wheel", CXX="/nowhere/g++")
    assert done.returncode == 1
    assert done.stderr.strip().endswith(
        "ddp_hooks: expected a C++20 compiler, found no /nowhere/g++: install g++, or set CXX to one"
    )


def built_wheel(source_distribution: Path) -> Path:
    """Return the wheel that `make wheel` has made of the sources as they are, or else what it is made of."""
    sources = [path for folder in ("csrc", "ddp_hooks") for path in (ROOT / folder).rglob("*.[hcp]*") if path.is_file()]
    written = {".cpp", ".h", ".cu", ".py"}
    newest = max(path.stat().st_mtime for path in sources if path.suffix in written)
    wheels = [path for path in (ROOT / "dist").glob("*.whl") if path.stat().st_mtime > newest]
    return wheels[0] if wheels else source_distribution


@pytest.mark.thorough
def test_it_runs_in_a_fresh_environment(source_distribution: Path, tmp_path: Path) -> None:
    """Fresh but for torch and what builds need, which would take minutes and gigabytes to install once more."""
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(fresh)], check=True, timeout=TIMEOUT_SECONDS)
    packages = next(fresh.glob("lib/python*/site-packages"))
    (packages / "torch_from_outside.pth").write_text(str(Path(torch.__file__).parents[1]))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python = fresh / "bin" / "python"
    installing = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run(
        [*installing, "--no-build-isolation", "--force-reinstall", str(built_wheel(source_distribution))],
        env=environment,
        cwd=tmp_path,
        check=True,
        timeout=3 * TIMEOUT_SECONDS,
    )
    command = "import ddp_hooks, sys; print(ddp_hooks.__file__); from ddp_hooks.__main__ import main; sys.exit(main())"
    done = run_captured([str(python), "-c", command, "info"], env=environment, cwd=tmp_path, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[0]).is_relative_to(fresh)
    assert {path.suffix for path in (packages / "ddp_hooks").rglob("*")} <= {"", ".py", ".pyi", ".pyc", ".so", ".typed"}
    assert torch.__version__ in done.stdout
    # The demo and the examples belong to the checkout.
    assert not list(packages.rglob("*demo*"))


def test_nobody_is_told_to_install_it_from_an_index() -> None:
    """It is on none. The Makefile's own is right: there it is installed, and only its extras are looked for."""
    listed = run_captured(["git", "ls-files"], cwd=ROOT, timeout=TIMEOUT_SECONDS)
    if listed.returncode != 0:
        pytest.skip("which files are the project's is known in a checkout only")
    wrong = re.compile(r"pip3? install [^`\n]*ddp_hooks\[")
    found = [
        name
        for name in listed.stdout.splitlines()
        if name.endswith((".md", ".py", ".toml"))
        and name != str(Path(__file__).relative_to(ROOT))
        and wrong.search((ROOT / name).read_text())
    ]
    assert found == []
