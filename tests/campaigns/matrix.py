"""Installs the wheel beside each supported torch, in an environment of its own, and tests what depends on torch.

    python tests/campaigns/matrix.py                      # every tested torch on this Python, and other Pythons
    python tests/campaigns/matrix.py 2.15.0 2.14.1@3.12   # these; the second on Python 3.12
    python tests/campaigns/matrix.py ===2.13.0            # PyPI's build, if pip's settings prefer 2.13.0+cpu
    python tests/campaigns/matrix.py --write docs/tested-versions.md

For each Python it makes the wheel, as `make wheels` does, unless --dist names a folder that has it, and what only
tests load. For each torch: a virtual environment in build/matrix; pip's installation of the wheel with no compiler on
the PATH, and the README's first script, with the seconds that both took; the probes of what is read of torch
(test_reducer_probes), every scenario beside plain DDP of that torch (test_equivalence), the options of DDP that not
every torch has (test_ddp_options), and the same for FSDP2 (test_fsdp_registration, test_fsdp); of a torch whose FSDP2
is not served only that it is refused. The environments are kept, so that a second run only installs the wheel and
tests; each takes up to 6 GB, unless --delete removes each one after its tests. Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "matrix"
TESTED_TORCH: tuple[str, ...] = runpy.run_path(str(ROOT / "ddp_hooks" / "_version.py"))["TESTED_TORCH"]
# Each with the newest torch that there is for it.
OTHER_PYTHONS = ("2.14.1@3.10", "2.15.0@3.12", "2.15.0@3.13", "2.15.0@3.14")
HERE = ".".join(platform.python_version_tuple()[:2])
MODULES = ("test_reducer_probes", "test_equivalence", "test_ddp_options", "test_fsdp_registration", "test_fsdp")
TIMEOUT_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Entry:
    torch: str  # a version, or ===version
    python: str

    @property
    def version(self) -> str:
        return self.torch.lstrip("=")

    @property
    def requirement(self) -> str:
        return f"torch{self.torch}" if self.torch != self.version else f"torch=={self.version}"

    @property
    def folder(self) -> Path:
        return FOLDER / f"torch-{self.torch}-python-{self.python}"

    @property
    def executable(self) -> Path:
        return self.folder / "venv" / "bin" / "python"


@dataclass(frozen=True, slots=True)
class Row:
    entry: Entry
    build: str = ""  # as torch names itself
    seconds: str = ""  # from pip's start to the end of the first training step
    tests: tuple[str, ...] = ()  # by module
    problem: str = ""  # what went wrong
    unavailable: bool = False  # it cannot be installed here

    @property
    def passed(self) -> bool:
        return not self.problem


class Failure(Exception):
    """A command failed; holds what to say in the table."""


def numbers_of(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def parse(text: str) -> Entry:
    torch, _, python = text.partition("@")
    return Entry(torch, python or HERE)


def run(entry: Entry, *command: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command, with its output in the entry's log."""
    with (entry.folder / "log.txt").open("a") as log:
        print("$", *command, file=log, flush=True)
        return subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )


def pip(entry: Entry, *arguments: str | Path) -> bool:
    return run(entry, entry.executable, "-m", "pip", "install", "--quiet", *arguments).returncode == 0


def prepare(entry: Entry) -> None:
    """Make the environment, unless it stands; without ddp_hooks."""
    if not entry.executable.exists():
        run(entry, find_python(entry.python), "-m", "venv", entry.folder / "venv")
    if not pip(entry, entry.requirement, "numpy"):
        raise Failure(f"pip finds no torch {entry.version} for Python {entry.python}")
    if not pip(entry, "pytest>=8", "hypothesis"):
        raise Failure("pip cannot install what the tests need")


@dataclass(frozen=True, slots=True)
class Made:
    """What is tested for a Python."""

    wheel: Path
    for_tests: Path  # the folder in which ddp_hooks_testing is


def make(python: str, dist: Path | None, torches: list[str]) -> Made:
    """Make the wheel for a Python, and what only tests load, for these torches."""
    interpreter = find_python(python)
    folder = FOLDER / "wheels"
    tools = folder / f"venv-{python}"
    if not tools.exists():
        subprocess.run([interpreter, "-m", "venv", tools], check=True)
        subprocess.run([tools / "bin" / "pip", "install", "--quiet", "setuptools>=77", "wheel"], check=True)
    if dist is None:
        dist = folder / f"dist-{python}"
        command = [tools / "bin" / "python", ROOT / "building" / "wheels.py", "--dist", dist, "--for-tests", *torches]
    else:
        command = [tools / "bin" / "python", ROOT / "building" / "wheels.py", "--only-for-tests", *torches]
    if subprocess.run(command, check=False).returncode != 0:
        raise Failure("the wheel cannot be made")
    (wheel,) = dist.glob(f"*-cp{python.replace('.', '')}-*.whl")
    return Made(wheel, ROOT / "build" / f"for-tests-{python}")


def find_python(python: str) -> str:
    interpreter = shutil.which(f"python{python}") if python != HERE else sys.executable
    if interpreter is None or subprocess.run([interpreter, "-c", ""], capture_output=True).returncode != 0:
        raise Failure(f"no Python {python} here")
    return interpreter


def install(entry: Entry, wheel: Path) -> str:
    """Install the wheel as a user would, train, and return the seconds until the first step was done."""
    run(entry, entry.executable, "-m", "pip", "uninstall", "--yes", "--quiet", "ddp_hooks")
    # Nobody compiles anything.
    programs = {"PATH": str(entry.executable.parent), "PYTHONPATH": "", "CXX": "/nowhere"}
    script = entry.folder / "train.py"
    text = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    step = "    optimizer.step()\n"
    assert text.count(step) == 1
    noted = (
        f"{step}    if step == 0 and dist.get_rank() == 0:\n        print('first step at', __import__('time').time())\n"
    )
    script.write_text(text.replace(step, noted))
    began = time.time()
    if run(entry, entry.executable, "-m", "pip", "install", "--quiet", wheel, **programs).returncode != 0:
        raise Failure("pip does not install the wheel")
    command = (entry.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    if run(entry, *command, cwd=entry.folder, **programs).returncode != 0:
        raise Failure("README's first script fails")
    found = re.findall(r"^first step at ([\d.]+)$", (entry.folder / "log.txt").read_text(), re.MULTILINE)
    return f"{float(found[-1]) - began:.1f}"


def test(entry: Entry, module: str, for_tests: Path, options: list[str]) -> tuple[str, bool]:
    """Run a test module on what is installed; what came of it, and whether that is well."""
    report = entry.folder / f"{module}.xml"
    report.unlink(missing_ok=True)
    (file,) = (ROOT / "tests").rglob(f"{module}.py")
    # From the folder of the tests, so that the checkout does not stand in the way of what is installed.
    command = (entry.executable, "-m", "pytest", "-q", *options, file, f"--junitxml={report}")
    done = run(entry, *command, cwd=ROOT / "tests", PYTHONPATH=str(for_tests))
    if not report.exists():
        return "did not run", False
    suite = next(iter(ElementTree.parse(report).getroot().iter("testsuite")))
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    said = f"{count['tests'] - failed - count['skipped']} passed"
    said += f", {failed} failed" if failed else ""
    said += f", {count['skipped']} skipped" if count["skipped"] else ""
    return said, done.returncode == 0


def try_out(entry: Entry, make_for: Callable[[str], Made], options: list[str]) -> Row:
    entry.folder.mkdir(parents=True, exist_ok=True)
    (entry.folder / "log.txt").unlink(missing_ok=True)
    try:
        prepare(entry)
    except Failure as failure:
        return Row(entry, problem=str(failure), unavailable=True)
    asking = [str(entry.executable), "-c", "import torch; print(torch.__version__)"]
    name = subprocess.run(asking, capture_output=True, text=True, check=False).stdout.strip()
    try:
        made = make_for(entry.python)
        seconds = install(entry, made.wheel)
    except Failure as failure:
        return Row(entry, name, problem=str(failure))
    results = [test(entry, module, made.for_tests, options) for module in MODULES]
    well = all(good for _, good in results)
    return Row(entry, name, seconds, tuple(said for said, _ in results), "" if well else "tests fail")


def commit_and_day() -> str:
    asking = ["git", "log", "-1", "--format=%h of %cs"]
    done = subprocess.run(asking, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def table(rows: list[Row], commit: str, wheels: list[Path], *, quick: bool) -> str:
    sizes = ", ".join(f"`{wheel.name}` ({wheel.stat().st_size / 1e6:.1f} MB)" for wheel in wheels)
    command = "make matrix MATRIX=--quick" if quick else "make matrix"
    lines = [
        "# Tested versions",
        "",
        f"This page shows the output of `{command}` for commit {commit}, with {sizes}.",
        "For each torch, the matrix makes an environment, installs the wheel without a compiler on the PATH, trains",
        "with the first script of the README, and runs the tests that depend on torch's internals, on the CPU over",
        "gloo. Seconds count from the start of `pip install` to the end of the first training step. A test is skipped",
        "if that torch lacks the option of DDP that the test needs.",
        "",
        "| torch | Python | seconds | " + " | ".join(f"{module}" for module in MODULES) + " | |",
        "|---|---|---|" + "---|" * len(MODULES) + "---|",
    ]
    for row in rows:
        cells = [row.build or row.entry.torch, row.entry.python, row.seconds]
        cells += row.tests or [""] * len(MODULES)
        cells.append("works" if row.passed else row.problem)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def after_table(page: Path) -> str:
    """Return the sections of a page that this program did not write."""
    _, heading, rest = page.read_text().partition("\n## ") if page.exists() else ("", "", "")
    return heading + rest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    everything = [*(f"{torch}@{HERE}" for torch in TESTED_TORCH), *OTHER_PYTHONS]
    parser.add_argument("entries", nargs="*", default=everything, help="TORCH or TORCH@PYTHON (default: all)")
    parser.add_argument("--dist", type=Path, help="a folder that has the wheels already")
    parser.add_argument("--quick", action="store_true", help="pairs of values where a test has several parameters")
    parser.add_argument("--delete", action="store_true", help="delete each environment after its tests")
    parser.add_argument("--write", type=Path, help="also write the table to the top of this page, row by row")
    arguments = parser.parse_args()
    commit = commit_and_day()
    entries = [parse(text) for text in arguments.entries]
    made: dict[str, Made] = {}
    rows = []

    def make_for(python: str) -> Made:
        if python not in made:
            torches = {each.version for each in entries if each.python == python}
            made[python] = make(python, arguments.dist, sorted(torches, key=numbers_of))
        return made[python]

    for entry in entries:
        began = time.monotonic()
        print(f"torch {entry.torch}, Python {entry.python}: ", end="", flush=True)
        row = try_out(entry, make_for, [] if arguments.quick else ["--all"])
        rows.append(row)
        if arguments.delete:
            shutil.rmtree(entry.folder / "venv", ignore_errors=True)
        said = "works" if row.passed else f"{row.problem}; see {(entry.folder / 'log.txt').relative_to(ROOT)}"
        print(f"{said} ({time.monotonic() - began:.0f} s)", flush=True)
        text = table(rows, commit, [each.wheel for each in made.values()], quick=arguments.quick)
        if arguments.write is not None:
            arguments.write.write_text(text + after_table(arguments.write))
    print(f"\n{text}")
    return 0 if all(row.passed or row.unavailable for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
