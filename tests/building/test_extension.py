"""What the package says when its extension does not load, as an import and as `python -m ddp_hooks info`."""

from __future__ import annotations

import importlib.machinery
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import run_captured

import ddp_hooks
from ddp_hooks import _C
from ddp_hooks_testing import _C as testing

TIMEOUT_SECONDS = 120
RELEASE = torch.__version__.partition("+")[0]
COMMIT = torch.version.git_version


# What is installed would be found instead of what is missing, by an editable installation's finder or beside torch.
WITHOUT_INSTALLATIONS = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder)]
sys.path = [{others!r} if path == {site_packages!r} else path for path in sys.path]
"""


@pytest.fixture
def unbuilt(tmp_path: Path) -> Path:
    """Copy the package without what a build makes, to where no other one is found."""
    package = tmp_path / "ddp_hooks"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(Path(ddp_hooks.__file__).parent, package, ignore=ignored)
    site_packages = Path(torch.__file__).parent.parent
    others = tmp_path / "others"
    others.mkdir()
    for other in site_packages.iterdir():
        if other.name != package.name:
            (others / other.name).symlink_to(other)
    customization = WITHOUT_INSTALLATIONS.format(others=str(others), site_packages=str(site_packages))
    (tmp_path / "sitecustomize.py").write_text(customization)
    return package


def run(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_captured(
        [sys.executable, *arguments],
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        timeout=TIMEOUT_SECONDS,
    )


def nothing(package: Path) -> None:
    pass


def add_file(package: Path, *builds: tuple[str, str], suffix: str = importlib.machinery.EXTENSION_SUFFIXES[0]) -> Path:
    """Make a file that is named like an extension for these versions and commits of torch."""
    names = [f"{version.replace('.', '_')}-{commit[:12]}" for version, commit in builds]
    path = package / f"{'-'.join(['_C', *names])}{suffix}"
    path.write_text("no library")
    return path


def other_torch(package: Path) -> None:
    add_file(package, ("2.0.0", "0" * 40))
    add_file(package, ("2.1.0", "1" * 40), ("2.1.1", "2" * 40))


def other_python(package: Path) -> None:
    add_file(package, (RELEASE, COMMIT), suffix=".cpython-37-x86_64-linux-gnu.so")


def other_commit(package: Path) -> None:
    add_file(package, ("2.0.0", "1" * 40))
    add_file(package, (RELEASE, "0" * 40))


def broken(package: Path) -> None:
    add_file(package, (RELEASE, COMMIT))


def truncated(package: Path) -> None:
    assert _C.__file__ is not None
    whole = Path(_C.__file__).read_bytes()
    add_file(package, (RELEASE, COMMIT)).write_bytes(whole[: len(whole) // 2])


def untested_torch(package: Path) -> None:
    version = package / "_version.py"
    text = re.sub(r"TESTED_TORCH = \(.+\)", 'TESTED_TORCH = ("1.7.1", "1.9.0")', version.read_text())
    version.write_text(text)


CASES = [
    (
        other_commit,
        [
            f"of {RELEASE} commit {'0' * 12}, but another build of that version is installed, of commit {COMMIT[:12]}",
            f"Either install the release of {RELEASE} from",
        ],
        f"for torch 2.0.0, {RELEASE}",
    ),
    (nothing, ["ddp_hooks is not built", "make build", "pip install --no-build-isolation ."], "not built"),
    (
        other_torch,
        [
            f"built for torch 2.0.0, 2.1.0, 2.1.1, but torch {RELEASE} is installed. ",
            "Either install one of these versions, or",
            "--no-build-isolation .",
        ],
        "for torch 2.0.0, 2.1.0, 2.1.1",
    ),
    (
        other_python,
        [
            f"expected an extension for {sys.implementation.cache_tag}, found _C-",
            "Install the wheel for this Python, or",
        ],
        "not built",
    ),
    (
        untested_torch,
        [f"expects torch 1.7 to 1.9, with which it is tested, but found torch {RELEASE}", "DDP_HOOKS_ANY_TORCH=1"],
        "not built",
    ),
    (broken, ["compiled extension cannot be loaded: ", "If the file is damaged, reinstall ddp_hooks"], "for torch"),
    (truncated, [" is truncated. If the file is damaged, reinstall ddp_hooks"], "for torch"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("spoil", "complaints", "built_for"), CASES, ids=[case[0].__name__ for case in CASES])
def test_an_extension_that_does_not_load(
    unbuilt: Path, spoil: Callable[[Path], None], complaints: list[str], built_for: str
) -> None:
    spoil(unbuilt)
    imported = run(unbuilt, "-c", "import ddp_hooks")
    assert imported.returncode == 1
    assert "circular import" not in imported.stderr
    assert imported.stderr.splitlines()[-1].startswith("ImportError: ddp_hooks")
    informed = run(unbuilt, "-m", "ddp_hooks", "info")
    assert informed.returncode == 1
    assert "Traceback" not in informed.stderr
    assert f"ddp_hooks  {ddp_hooks.__version__}, {built_for}" in informed.stdout
    assert f"torch      {torch.__version__}" in informed.stdout
    for complaint in complaints:
        assert complaint in imported.stderr
        assert complaint in " ".join(informed.stderr.split())
    assert all(len(line) <= 80 or " " not in line for line in informed.stderr.splitlines())


# test_any_torch_still_needs_an_extension gets as far with that variable.
@pytest.mark.thorough
def test_an_untested_torch_can_be_tried(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untested_torch(unbuilt)
    monkeypatch.setenv("DDP_HOOKS_ANY_TORCH", "1")
    assert "ddp_hooks is not built" in run(unbuilt, "-c", "import ddp_hooks").stderr


def test_a_missing_torch_is_named(unbuilt: Path) -> None:
    imported = run(unbuilt, "-c", "import sys; sys.modules['torch'] = None; import ddp_hooks")
    assert "ImportError: ddp_hooks needs torch, which is not installed" in imported.stderr


def test_another_module_that_imports_the_package_gets_the_error(unbuilt: Path) -> None:
    other = unbuilt.parent / "other"
    other.mkdir()
    (other / "__init__.py").write_text("import ddp_hooks\n")
    (other / "__main__.py").write_text("")
    done = run(unbuilt, "-m", "other", "ddp_hooks")
    assert done.returncode == 1
    assert "ImportError: ddp_hooks is not built" in done.stderr
    assert done.stdout == ""


def test_a_checkout_that_shadows_the_installed_package(unbuilt: Path) -> None:
    """`pip install` of the wheel, and then Python from a checkout's root."""
    installed = unbuilt.parent / "site-packages" / "ddp_hooks"
    shutil.copytree(Path(ddp_hooks.__file__).parent, installed)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(unbuilt.parent), str(installed.parent)])}

    def run_here(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
        return run_captured([sys.executable, *arguments], cwd=folder, env=environment, timeout=TIMEOUT_SECONDS)

    said = f"the checkout in {unbuilt.parent} shadows the package installed in {installed.parent}"
    imported = run_here("-c", "import ddp_hooks", folder=unbuilt.parent)
    assert imported.returncode == 1
    assert said in imported.stderr.splitlines()[-1]
    assert "from another directory" in imported.stderr
    assert "`make build`" in imported.stderr
    informed = run_here("-m", "ddp_hooks", "info", folder=unbuilt.parent)
    assert informed.returncode == 1
    assert said in " ".join(informed.stderr.split())


def test_a_second_one_that_is_not_built_either_shadows_nothing(unbuilt: Path) -> None:
    other = unbuilt.parent / "site-packages"
    shutil.copytree(unbuilt, other / "ddp_hooks")
    code = f"import sys; sys.path.append({str(other)!r}); import ddp_hooks"
    done = run(unbuilt, "-c", code)
    assert "ImportError: ddp_hooks is not built: its compiled" in done.stderr
    assert "shadows" not in done.stderr


def test_any_torch_still_needs_an_extension(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel beside a torch that nobody has tested: to try it, it has to be built for that one."""
    other_torch(unbuilt)
    untested_torch(unbuilt)
    monkeypatch.setenv("DDP_HOOKS_ANY_TORCH", "1")
    said = run(unbuilt, "-c", "import ddp_hooks").stderr
    assert f"built for torch 2.0.0, 2.1.0, 2.1.1, but torch {RELEASE} is installed" in said


def test_one_file_serves_every_build_of_a_commit(unbuilt: Path) -> None:
    """Builds for the CPU and for each CUDA differ in the local part of their version alone."""
    assert _C.__file__ is not None
    shutil.copy(_C.__file__, add_file(unbuilt, ("2.0.0", "0" * 40), (RELEASE, COMMIT)))
    rename = "import torch; torch.__version__ = torch.__version__.partition('+')[0] + '+renamed'; import ddp_hooks"
    done = run(unbuilt, "-c", f"{rename}; print(ddp_hooks._C.__file__)")
    assert done.returncode == 0, done.stderr
    assert "_C-2_0_0-000000000000-" in done.stdout


# What a method or a function returns; nobody calls them by name.
RETURNED = {"BucketLayout", "LayoutOfBuckets", "PendingUnitScan", "Statistics", "Units", "UsageMask"}
# What extensions of other people call, for devices of theirs.
OFFERED = {"register_device_kernels"}
# Each extension has memory of its own, and so switches and a driver of its own.
IN_BOTH = {"leave_out_avx2", "why_unserved"}


def test_the_extension_holds_nothing_for_tests() -> None:
    """What only tests ask stands in `ddp_hooks_testing._C`, which no wheel holds."""
    text = "\n".join(path.read_text() for path in Path(ddp_hooks.__file__).parent.rglob("*.py"))
    names = {name for name in dir(_C) if not name.startswith("__")}
    assert {name for name in names if not re.search(rf"\b_C\.{name}\b", text)} == RETURNED | OFFERED | {
        "leave_out_avx2"
    }
    assert names & {name for name in dir(testing) if not name.startswith("__")} == IN_BOTH
