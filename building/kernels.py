"""Compiles the CUDA kernels into one file for every GPU and every CUDA.

nvcc translates them to PTX, ptxas assembles that for the oldest GPU of each generation, which the later ones of that
generation run, too, and the PTX goes along for generations to come. The kernels use nothing that is newer than the
driver that csrc/kernels/cuda/driver.cpp asks for, so the PTX is marked as that driver's; ptxas refuses it otherwise.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .jobs import Job

PTX_VERSION = "8.1"  # of CUDA 12.1, the first with 32,764 bytes of kernel parameters
OLDEST_ARCHITECTURE = 70
# Later GPUs have an instruction for what the kernels do in a loop otherwise (warp.cuh).
NEWER_ARCHITECTURE = 80


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A CUDA compiler, and the assembler that goes with it or was chosen instead."""

    nvcc: str
    ptxas: str
    fatbinary: str

    def architectures(self) -> list[int]:
        """List the oldest GPU of each generation that the assembler knows."""
        known = sorted({int(name) for name in re.findall(r"'sm_(\d+)'", _print(self.ptxas, "--help"))})
        oldest = {number // 10: number for number in reversed(known) if number >= OLDEST_ARCHITECTURE}
        return sorted(oldest.values())

    def sources(self) -> tuple[int, int]:
        """Return the architectures that nvcc translates for."""
        known = re.findall(r"\bcompute_(\d+)\b", _print(self.nvcc, "--list-gpu-arch"))
        return min(number for number in map(int, known) if number >= OLDEST_ARCHITECTURE), NEWER_ARCHITECTURE


def find_toolkit() -> Toolkit | None:
    """Return the CUDA toolkit of CUDA_HOME, the PATH or the usual folder; None if there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [str(Path(home) / "bin")] if home else [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(places))
    if nvcc is None:
        return None
    # What is on the PATH may be a link or a script elsewhere; nvcc itself knows where the rest of the toolkit is.
    top = re.search(r"^#\$ TOP=(.+)$", _print(nvcc, "--dryrun", "-x", "cu", os.devnull), re.MULTILINE)
    tools = (Path(top[1]).resolve() if top else Path(nvcc).resolve().parent.parent) / "bin"
    return Toolkit(nvcc, os.environ.get("DDP_HOOKS_PTXAS") or str(tools / "ptxas"), str(tools / "fatbinary"))


def plan(toolkit: Toolkit, csrc: Path, folder: Path, *, warnings_are_errors: bool) -> Job:
    """Return the job that makes the fat binary in ``folder``."""
    source = csrc / "kernels" / "cuda" / "kernels.cu"
    oldest, newer = toolkit.sources()
    checks = ("-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra") if warnings_are_errors else ("-w",)
    ptx = {}
    for number in (oldest, newer):
        output = folder / f"compute_{number}.ptx"
        command = (toolkit.nvcc, "-std=c++20", "-O3", f"-I{csrc}", f"-arch=compute_{number}", "-ptx", *checks)
        depfile = ("-MMD", "-MF", f"{output}.d")
        ptx[number] = Job(output, [source], (*command, *depfile, str(source), "-o", str(output)))
    images = []
    jobs = []
    for number in toolkit.architectures():
        made_for = newer if number >= newer else oldest
        target = min(made_for, number)
        marked = _mark(ptx[made_for], folder / f"marked_{target}.ptx", target)
        cubin = folder / f"sm_{number}.cubin"
        # Where the kernels were measured; elsewhere some assemblers spill a register of one or two kernels.
        spills = ("--warn-on-spills", "--warning-as-error") if warnings_are_errors and number == 90 else ()
        command = (toolkit.ptxas, "-O3", f"-arch=sm_{number}", *spills, str(marked.output), "-o", str(cubin))
        jobs.append(Job(cubin, [], command, [marked]))
        images.append(f"--image3=kind=elf,sm={number},file={cubin}")
    marked = _mark(ptx[newer], folder / f"marked_{newer}.ptx", newer)
    images.append(f"--image3=kind=ptx,sm={newer},file={marked.output}")
    # In the form that drivers have read for longest.
    compression = ["--compress-all"]
    if "--compress-mode" in _print(toolkit.fatbinary, "--help"):
        compression.append("--compress-mode=speed")
    output = folder / "kernels.fatbin"
    return Job(output, [], (toolkit.fatbinary, f"--create={output}", "-64", *compression, *images), [*jobs, marked])


def _mark(ptx: Job, output: Path, architecture: int) -> Job:
    command = ("mark", PTX_VERSION, str(architecture), str(ptx.output))
    return Job(output, [], command, [ptx], _marking(ptx.output, output, architecture))


def _marking(source: Path, output: Path, architecture: int) -> Callable[[], None]:
    def mark() -> None:
        text = re.sub(r"(?m)^\.version \S+$", f".version {PTX_VERSION}", source.read_text(), count=1)
        output.write_text(re.sub(r"(?m)^\.target sm_\d+", f".target sm_{architecture}", text, count=1))

    return mark


def _print(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
