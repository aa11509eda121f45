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

import ddp_hooks
from ddp_hooks import _C
from ddp_hooks_testing import _C as testing

TIMEOUT_SECONDS = 120
RELEASE = torch.__version__.partition("+")[0]


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
    ignored = shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__")
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
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def nothing(package: Path) -> None:
    pass


def other_torch(package: Path) -> None:
    (package / "_build_info.py").write_text('TORCH_VERSION = "2.0.0"\n')


def other_python(package: Path) -> None:
    (package / "_build_info.py").write_text(f'TORCH_VERSION = "{torch.__version__}"\n')
    (package / "_C.cpython-37-x86_64-linux-gnu.so").touch()


def broken(package: Path) -> None:
    (package / "_build_info.py").write_text(f'TORCH_VERSION = "{torch.__version__}"\n')
    (package / f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_text("no library")


def renamed_torch(package: Path) -> None:
    describe(package, f"{RELEASE}+renamed", torch.version.git_version)


def rebuilt_torch(package: Path) -> None:
    describe(package, f"{RELEASE}+rebuilt", "0" * 40)


def untested_torch(package: Path) -> None:
    version = package / "_version.py"
    text = re.sub(r"TESTED_TORCH = \(.+\)", 'TESTED_TORCH = ("1.7.1", "1.9.0")', version.read_text())
    version.write_text(text)


def describe(package: Path, version: str, commit: str | None) -> None:
    lines = (f"TORCH_VERSION = {version!r}", f"TORCH_COMMIT = {commit!r}", f"TORCH_CUDA = {torch.version.cuda!r}")
    (package / "_build_info.py").write_text("\n".join(lines) + "\n")


CASES = [
    # The same torch under another name is taken; what is missing then is the extension.
    (renamed_torch, ["compiled extension is missing"], f"built for torch {RELEASE}+renamed"),
    (
        rebuilt_torch,
        ["+rebuilt, but torch", "rebuild it against"],
        f"built for torch {RELEASE}+rebuilt",
    ),
    (nothing, ["ddp_hooks is not built", "make build", "pip install --no-build-isolation ."], "not built"),
    (
        other_torch,
        ["built for torch 2.0.0, but torch", "rebuild it against"],
        "built for torch 2.0.0",
    ),
    (
        other_python,
        [
            f"expected an extension for {sys.implementation.cache_tag}, found _C.cpython-37",
            "rebuild it against",
        ],
        "built for torch",
    ),
    (
        untested_torch,
        [f"expects torch 1.7 to 1.9, with which it is tested, but found torch {RELEASE}", "DDP_HOOKS_ANY_TORCH=1"],
        "not built",
    ),
    (broken, ["compiled extension cannot be loaded: ", "rebuild it against"], "built for torch"),
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


def test_an_untested_torch_can_be_tried(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untested_torch(unbuilt)
    monkeypatch.setenv("DDP_HOOKS_ANY_TORCH", "1")
    assert "ddp_hooks is not built" in run(unbuilt, "-c", "import ddp_hooks").stderr


def test_a_missing_torch_is_named(unbuilt: Path) -> None:
    other_torch(unbuilt)
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


@pytest.mark.parametrize("spoil", [nothing, pytest.param(renamed_torch, marks=pytest.mark.thorough)])
def test_a_checkout_that_hides_what_is_installed(unbuilt: Path, spoil: Callable[[Path], None]) -> None:
    """`pip install .`, and then Python from the checkout's root; a build leaves _build_info.py there, or does not."""
    installed = unbuilt.parent / "site-packages" / "ddp_hooks"
    shutil.copytree(Path(ddp_hooks.__file__).parent, installed)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(unbuilt.parent), str(installed.parent)])}
    spoil(unbuilt)

    def run_here(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )

    said = f"the checkout in {unbuilt.parent} shadows the package installed in {installed.parent}"
    imported = run_here("-c", "import ddp_hooks", folder=unbuilt.parent)
    assert imported.returncode == 1
    assert said in imported.stderr.splitlines()[-1]
    assert "from another directory" in imported.stderr
    assert "`make build`" in imported.stderr
    informed = run_here("-m", "ddp_hooks", "info", folder=unbuilt.parent)
    assert informed.returncode == 1
    assert said in " ".join(informed.stderr.split())


def test_a_second_one_that_is_not_built_either_hides_nothing(unbuilt: Path) -> None:
    other = unbuilt.parent / "site-packages"
    shutil.copytree(unbuilt, other / "ddp_hooks")
    code = f"import sys; sys.path.append({str(other)!r}); import ddp_hooks"
    done = run(unbuilt, "-c", code)
    assert "ImportError: ddp_hooks is not built: its compiled" in done.stderr
    assert "hides" not in done.stderr


# What a method or a function returns; nobody calls them by name.
RETURNED = {
    "BucketLayout",
    "BucketPlan",
    "DirectGroup",
    "DirectMessage",
    "DirectPart",
    "Disposition",
    "Message",
    "PendingUnitScan",
    "Slice",
    "Statistics",
}
# What extensions of other people call, for devices of theirs.
OFFERED = {"register_device_kernels"}
# Each extension has memory of its own, and so a switch of its own.
SWITCHES = {"leave_out_avx2"}


def test_the_extension_holds_nothing_for_tests() -> None:
    """What only tests ask stands in `ddp_hooks_testing._C`, which no wheel holds."""
    text = "\n".join(path.read_text() for path in Path(ddp_hooks.__file__).parent.rglob("*.py"))
    names = {name for name in dir(_C) if not name.startswith("__")}
    assert {name for name in names if not re.search(rf"\b_C\.{name}\b", text)} == RETURNED | OFFERED | SWITCHES
    assert names & {name for name in dir(testing) if not name.startswith("__")} == SWITCHES
