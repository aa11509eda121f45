"""Builds ddp_hooks for each supported torch, in an environment of its own, and tests what depends on torch's inside.

    python tests/campaigns/matrix.py                          # every tested torch on Python 3.11, and the other Pythons
    python tests/campaigns/matrix.py 2.15.0 2.14.1@3.12       # these; the second on Python 3.12
    python tests/campaigns/matrix.py --write docs/tested-versions.md

For each: a virtual environment in build/matrix, pip's build of the source distribution beside that torch, the probes of
what is read of torch (test_reducer_probes), every scenario beside plain DDP of that torch (test_equivalence), the
options of DDP that not every torch has (test_ddp_options), and the same for FSDP2 (test_fsdp_registration, test_fsdp);
of a torch whose FSDP2 is not served only that it is refused. The environments are kept, so that a second run only
builds and tests; each takes up to 6 GB. Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import platform
import runpy
import shutil
import subprocess
import sys
import time
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
    torch: str
    python: str

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
    tests: tuple[str, ...] = ()  # by module
    problem: str = ""  # what went wrong
    unavailable: bool = False  # it cannot be installed here

    @property
    def passed(self) -> bool:
        return not self.problem


class Failure(Exception):
    """A command failed; holds what to say in the table."""


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
    interpreter = shutil.which(f"python{entry.python}") if entry.python != HERE else sys.executable
    if interpreter is None or subprocess.run([interpreter, "-c", ""], capture_output=True).returncode != 0:
        raise Failure(f"no Python {entry.python} here")
    if not entry.executable.exists():
        run(entry, interpreter, "-m", "venv", entry.folder / "venv")
    if not pip(entry, f"torch=={entry.torch}", "numpy"):
        raise Failure(f"pip finds no torch {entry.torch} for Python {entry.python}")
    if not pip(entry, "setuptools>=77", "wheel", "ninja", "pytest>=8", "hypothesis"):
        raise Failure("pip cannot install what the tests need")


def build(entry: Entry, source: Path) -> None:
    """Build the source distribution beside the entry's torch, as a user would, and install it."""
    # Whether the kernels can be compiled depends on nvcc's version; `make cuda-compile` does it by itself.
    done = run(
        entry,
        *(entry.executable, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps"),
        *("--no-build-isolation", source),
        DDP_HOOKS_CUDA="0",
        DDP_HOOKS_TESTING="1",
    )
    if done.returncode != 0:
        raise Failure("the build fails")


def test(entry: Entry, module: str) -> tuple[str, bool]:
    """Run a test module on what is installed; what came of it, and whether that is well."""
    report = entry.folder / f"{module}.xml"
    report.unlink(missing_ok=True)
    (file,) = (ROOT / "tests").rglob(f"{module}.py")
    # From the folder of the tests, so that the checkout does not stand in the way of what is installed.
    command = (entry.executable, "-m", "pytest", "-q", "--all", file, f"--junitxml={report}")
    done = run(entry, *command, cwd=ROOT / "tests", PYTHONPATH="")
    if not report.exists():
        return "did not run", False
    suite = next(iter(ElementTree.parse(report).getroot().iter("testsuite")))
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    said = f"{count['tests'] - failed - count['skipped']} passed"
    said += f", {failed} failed" if failed else ""
    said += f", {count['skipped']} skipped" if count["skipped"] else ""
    return said, done.returncode == 0


def try_out(entry: Entry, source: Path) -> Row:
    entry.folder.mkdir(parents=True, exist_ok=True)
    (entry.folder / "log.txt").unlink(missing_ok=True)
    try:
        prepare(entry)
    except Failure as failure:
        return Row(entry, problem=str(failure), unavailable=True)
    asking = [str(entry.executable), "-c", "import torch; print(torch.__version__)"]
    name = subprocess.run(asking, capture_output=True, text=True, check=False).stdout.strip()
    try:
        build(entry, source)
    except Failure as failure:
        return Row(entry, name, problem=str(failure))
    results = [test(entry, module) for module in MODULES]
    well = all(good for _, good in results)
    return Row(entry, name, tuple(said for said, _ in results), "" if well else "tests fail")


def make_source_distribution() -> Path:
    folder = FOLDER / "sdist"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # Not in the checkout's own egg-info, which belongs to what is installed from it.
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(folder), "sdist", "--dist-dir"]
    subprocess.run([*command, str(folder)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("*.tar.gz"))


def commit_and_day() -> str:
    asking = ["git", "log", "-1", "--format=%h of %cs"]
    done = subprocess.run(asking, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def table(rows: list[Row], commit: str) -> str:
    lines = [
        "# Tested versions",
        "",
        f"What `make matrix` printed for commit {commit}. For each torch it makes an environment, builds without the",
        "CUDA kernels, and runs the tests that depend on torch's inside, on the CPU over gloo. A test is skipped where",
        "a torch does not have the option of DDP's that it is about.",
        "",
        "| torch | Python | " + " | ".join(f"{module}" for module in MODULES) + " | |",
        "|---|---|" + "---|" * len(MODULES) + "---|",
    ]
    for row in rows:
        cells = [row.build or row.entry.torch, row.entry.python]
        cells += row.tests or [""] * len(MODULES)
        cells.append("works" if row.passed else row.problem)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    everything = [*(f"{torch}@3.11" for torch in TESTED_TORCH), *OTHER_PYTHONS]
    parser.add_argument("entries", nargs="*", default=everything, help="TORCH or TORCH@PYTHON; all without")
    parser.add_argument("--write", type=Path, help="also write the table into this file")
    arguments = parser.parse_args()
    commit = commit_and_day()
    source = make_source_distribution()
    rows = []
    for entry in map(parse, arguments.entries):
        began = time.monotonic()
        print(f"torch {entry.torch}, Python {entry.python}: ", end="", flush=True)
        row = try_out(entry, source)
        rows.append(row)
        said = "works" if row.passed else f"{row.problem}; see {(entry.folder / 'log.txt').relative_to(ROOT)}"
        print(f"{said} ({time.monotonic() - began:.0f} s)", flush=True)
    print()
    print(table(rows, commit))
    if arguments.write is not None:
        arguments.write.write_text(table(rows, commit))
    return 0 if all(row.passed or row.unavailable for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
