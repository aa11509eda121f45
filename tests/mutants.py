"""Delete what orders streams and keeps memory alive, one thing at a time: the pretended device has to notice each.

    python tests/mutants.py            every deletion, some minutes each
    python tests/mutants.py NAME ...   some of them

Each is made in a copy of the checkout, under build/, which is built anew; then test_pretend.py runs there, with one
seed after another, until it fails. A deletion that no seed notices is an error, and so is one whose text is gone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPY = ROOT / "build" / "mutants"
COPIED = ("csrc", "ddp_hooks", "ddp_hooks_testing", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE")
MOST_SEEDS = 100
TEST_SECONDS = 600.0


@dataclass(frozen=True)
class Deletion:
    """What is taken out.

    Attributes:
        name: what for.
        file: where, in csrc/.
        text: what, once in that file.
        instead: what stands there then.
        tests: an expression for pytest, of the tests in which it matters.
    """

    name: str
    file: str
    text: str
    instead: str = ""
    tests: str = ""


DELETIONS = (
    Deletion(
        "events of a bucket's messages are waited for",
        "transport/step_in_flight.cpp",
        "end.block(current_stream(buffer_.device()));",
        "(void)end;",
    ),
    Deletion(
        "a message's end is recorded",
        "transport/step_in_flight.cpp",
        "end.record(current_stream(buffer_.device()));",
        "(void)end;",
    ),
    Deletion(
        "the host waits for a scan's answer",
        "kernels/device_answer.h",
        "    copied_.synchronize();\n    under_way_ = false;",
        "    under_way_ = false;",
        "values or auto or narrow",
    ),
    Deletion(
        "completions run on a stream of the device",
        "transport/launch.cpp",
        "  if (!tensor.is_cpu()) tensor.record_stream(current_stream(tensor.device()));",
        "  (void)tensor;",
    ),
    Deletion(
        "packed messages are kept until they are scattered",
        "transport/message_sender.cpp",
        "               scatter(packed, to);\n               keep_for_stream(packed);",
        "               scatter(packed, to);",
        "pack",
    ),
    Deletion(
        "what was received is kept until it is added up",
        "transport/direct_sender.cpp",
        "              keep_for_stream(received.memory);\n",
        "",
        "narrow or Branches",
    ),
)


def main(names: list[str]) -> int:
    """Try the deletions of these names, or all; return the process's exit status."""
    chosen = [one for one in DELETIONS if not names or one.name in names]
    if not chosen:
        sys.exit(f"expected some of {', '.join(repr(one.name) for one in DELETIONS)}, received {names}")
    copy()
    unnoticed = []
    for deletion in chosen:
        begun = time.monotonic()
        source = COPY / "csrc" / deletion.file
        before = source.read_text()
        found = before.count(deletion.text)
        if found != 1:
            sys.exit(f"{deletion.name}: expected its text once in {deletion.file}, found it {found} times")
        source.write_text(before.replace(deletion.text, deletion.instead))
        try:
            seed = first_noticed(deletion)
        finally:
            source.write_text(before)
        seconds = time.monotonic() - begun
        print(
            f"{deletion.name}: {'NOT NOTICED' if seed is None else f'noticed with seed {seed}'} ({seconds:.0f} s)",
            flush=True,
        )
        if seed is None:
            unnoticed.append(deletion.name)
    return 1 if unnoticed else 0


def copy() -> None:
    """Copy what is built and tested, so that the checkout stays what it is; what was built before is kept."""
    COPY.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        source, target = ROOT / name, COPY / name
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy2(source, target)


def first_noticed(deletion: Deletion) -> int | None:
    """Return the first seed with which a test fails; None if none does."""
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(build, cwd=COPY, env={**os.environ, "DDP_HOOKS_TESTING": "1", "DDP_HOOKS_CUDA": "0"}, check=True)
    select = ["-k", deletion.tests] if deletion.tests else []
    test = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "test_pretend.py", *select]
    for seed in range(1, MOST_SEEDS + 1):
        environment = {**os.environ, "PYTHONPATH": str(COPY), "DDP_HOOKS_PRETEND_SEED": str(seed)}
        try:
            run = subprocess.run(test, cwd=COPY / "tests", env=environment, capture_output=True, timeout=TEST_SECONDS)
        except subprocess.TimeoutExpired:
            return seed
        if run.returncode == 1:
            return seed
        if run.returncode != 0:
            sys.exit(f"{deletion.name}: pytest ended with {run.returncode}:\n{run.stdout.decode()}")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
