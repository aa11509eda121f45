"""Delete what orders streams and keeps memory alive, one thing at a time: the pretended device has to notice each.

    python tests/mutants.py            every deletion, some minutes each
    python tests/mutants.py NAME ...   some of them

Each is made in a copy of the checkout, under build/, which is built anew; then the fuzzer runs there on the pretended
device, with one seed after another, until it notices. A deletion that no seed notices is an error, and so is one whose
text is gone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPY = ROOT / "build" / "mutants"
COPIED = ("csrc", "ddp_hooks", "ddp_hooks_testing", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE")
MOST_SEEDS = 300


@dataclass(frozen=True)
class Deletion:
    """What is taken out.

    Attributes:
        name: what for.
        file: where, in csrc/.
        text: what, once in that file.
        instead: what stands there then.
    """

    name: str
    file: str
    text: str
    instead: str = ""


# Of a device's answer to a scan, of messages and of their completions, each in turn.
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
    ),
    Deletion(
        "an answer that nobody has waited for is kept until it is there",
        "kernels/device_answer.h",
        "    if (!under_way_) return;",
        "    return;",
    ),
    Deletion(
        "the stream waits for contributions before owners add them up",
        "engine/engine.cpp",
        "      contributions->wait();",
        "",
    ),
    Deletion(
        "what lay in gaps is kept until it is put back",
        "transport/message_sender.cpp",
        "                 keep_for_stream(content);\n",
        "",
    ),
    Deletion(
        "what is scanned for units is kept until then",
        "kernels/unit_scan.cpp",
        "    slice.flat.record_stream(stream);",
        "",
    ),
    Deletion(
        "what is scanned for zeros is kept until then",
        "kernels/nonzero_scan.cpp",
        "      slice.flat.record_stream(stream);",
        "",
    ),
    Deletion(
        "what is sampled is kept until then",
        "kernels/unit_sample.cpp",
        "      slice.flat.record_stream(stream);",
        "",
    ),
    Deletion(
        "messages are kept until their completions have run",
        "transport/launch.cpp",
        "  if (!tensor.is_cpu()) tensor.record_stream(current_stream(tensor.device()));",
        "  (void)tensor;",
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
    """Return the first seed with which the fuzzer notices; None if with none."""
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(build, cwd=COPY, env={**os.environ, "DDP_HOOKS_TESTING": "1", "DDP_HOOKS_CUDA": "0"}, check=True)
    fuzz = [sys.executable, "fuzz.py", "--device", "pretend", "--seeds", f"0:{MOST_SEEDS}"]
    run = subprocess.run(
        [*fuzz, "--until-failure", "--shrink-seconds", "0"],
        cwd=COPY / "tests",
        env={**os.environ, "PYTHONPATH": str(COPY)},
        capture_output=True,
        text=True,
    )
    found = re.search(r"^seed (\d+) on", run.stdout, re.MULTILINE)
    if run.returncode not in (0, 1) or (run.returncode == 1) != (found is not None):
        sys.exit(f"{deletion.name}: the fuzzer ended with {run.returncode}:\n{run.stdout}\n{run.stderr}")
    return None if found is None else int(found[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
