"""Builds the extension against the installed torch; everything else about the package stands in pyproject.toml.

The CUDA kernels are compiled when torch has CUDA and nvcc is found; no GPU is needed for that.

The extension runs with the very torch that it was compiled against. So what is built requires that torch, and says so
in its version: 0.1.0+pt2.13.0.cpu. The source distribution, which is compiled later, requires a range of them, which
stands in ddp_hooks/_version.py; beside another torch nothing is built.

Environment:
    DDP_HOOKS_CUDA        1: compile the CUDA kernels or fail; 0: leave them out; unset: where it is possible.
    DDP_HOOKS_ANY_TORCH=1 build beside a torch that ddp_hooks is not tested with, to try.
    DDP_HOOKS_WERROR=1    look for compiler warnings, and treat them as errors (CI does).
    DDP_HOOKS_DEBUG=1     keep symbols for a debugger; the extension is then many times as large and takes twice as
                          long.
    DDP_HOOKS_TESTING=1   also build ddp_hooks_testing._C, which only tests use (`make build` does).
    DDP_HOOKS_SANITIZE    "address,undefined" or "thread": compile with these sanitizers. Their runtime has to be loaded
                          before Python; `make test-asan` and `make test-tsan` see to that and to a folder of its own.
    TORCH_CUDA_ARCH_LIST  GPU architectures, as for every torch extension ("9.0" or "8.0;9.0+PTX"). Unset, it is those
                          of the GPUs that are visible here, or if none is, all that the installed torch was built for.
    CUDA_HOME, MAX_JOBS   where nvcc is, and how many compilers run at once, as for every torch extension.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools

try:
    import torch
except ModuleNotFoundError:
    sys.exit(
        "ddp_hooks: expected torch where this is built, found none. The extension runs only with the torch that it was "
        "compiled against: install that one first, and then build beside it, with `pip install --no-build-isolation`"
    )

ROOT = Path(__file__).parent
VERSIONS = runpy.run_path(str(ROOT / "ddp_hooks" / "_version.py"))
# A source distribution is compiled by somebody else; pip and build ask for egg_info before they make anything.
if not {"sdist", "egg_info"} & set(sys.argv) and (untested := VERSIONS["why_untested"](torch.__version__)):
    sys.exit(untested)
# What needs torch's headers is compiled many rooms at a time, because reading them takes most of the time: half of what
# the largest of these takes. Patterns in csrc/; every other file is compiled by itself.
COMPILED_AS_ONE = {
    "kernels_and_layout": ["kernels/*.cpp", "kernels/cuda/*.cpp", "layout/*.cpp"],
    "detectors_and_transport": ["detectors/*.cpp", "transport/*.cpp"],
    "agreement_and_engine": ["reducer/*.cpp", "agreement/*.cpp", "engine/*.cpp"],
    "bindings_of_kernels": [
        f"bindings/{room}.cpp"
        for room in ("module", "kernels", "layout", "detectors", "transport", "shards", "threads")
    ],
    "bindings_of_engine": [f"bindings/{room}.cpp" for room in ("agreement", "reducer", "engine")],
    "testing": ["testing/*.cpp"],
}
# What stands in one of the two extensions only; they link the rest both, and it is compiled once.
BINDINGS = {"ddp_hooks._C": ("bindings_of_kernels", "bindings_of_engine"), "ddp_hooks_testing._C": ("testing",)}
# Kernel parameters by value in constant memory (__grid_constant__) begin with this one.
OLDEST_ARCHITECTURE = (7, 0)
SANITIZERS = ("", "address,undefined", "thread")


def find_toolkit() -> Path | None:
    """Return the folder of the CUDA toolkit, or None without an nvcc."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    # Where torch looks, too: the variable, the PATH, the toolkit's usual folder.
    places = [str(Path(home) / "bin")] if home else [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(places))
    if nvcc is None:
        return None
    # What is on the PATH may be a link or a script elsewhere; nvcc itself knows where the rest of the toolkit is.
    plan = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.+)$", plan.stdout + plan.stderr, re.MULTILINE)
    return Path(top[1]).resolve() if top else Path(nvcc).resolve().parent.parent


def choose_cuda() -> bool:
    """Decide whether to compile the CUDA kernels, and say so."""
    wish = os.environ.get("DDP_HOOKS_CUDA", "")
    if wish not in ("", "0", "1"):
        sys.exit(f"DDP_HOOKS_CUDA: expected 0, 1 or nothing, received {wish!r}")
    if wish == "0":
        return False
    missing = []
    if torch.version.cuda is None:
        missing.append(f"a torch with CUDA (installed is {torch.__version__}; install one from pytorch.org)")
    toolkit = find_toolkit()
    if toolkit is None:
        missing.append("nvcc (install the CUDA toolkit of torch's CUDA version, or set CUDA_HOME to where it is)")
    if missing:
        if wish == "1":
            sys.exit(f"DDP_HOOKS_CUDA=1: the CUDA kernels need {' and '.join(missing)}")
        if torch.version.cuda is not None:
            print("ddp_hooks: nvcc is not found, so the CUDA kernels are left out and CUDA models will be refused")
        return False
    # Before cpp_extension is imported, which looks around for itself and may find another one, or half of one.
    os.environ["CUDA_HOME"] = str(toolkit)
    if not os.environ.get("TORCH_CUDA_ARCH_LIST") and torch.cuda.device_count() == 0:
        os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(architectures_of_torch())
        print(
            "ddp_hooks: no GPU is visible here, so the CUDA kernels are compiled for every architecture of the "
            f"installed torch: {os.environ['TORCH_CUDA_ARCH_LIST']}. Set TORCH_CUDA_ARCH_LIST to choose"
        )
    return True


def architectures_of_torch() -> list[str]:
    """List what the installed torch was compiled for, as far as the kernels run there; later GPUs compile the last."""
    # torch.cuda.get_arch_list() says nothing where no GPU is visible.
    found = re.findall(r"\bsm_(\d+)(\d)\b", torch._C._cuda_getArchFlags() or "")
    versions = sorted({(int(major), int(minor)) for major, minor in found})
    names = [f"{major}.{minor}" for major, minor in versions if (major, minor) >= OLDEST_ARCHITECTURE]
    return [*names[:-1], *(f"{name}+PTX" for name in names[-1:])]


WITH_CUDA = choose_cuda()

from torch.utils import cpp_extension  # noqa: E402


def sanitizer_flags() -> tuple[list[str], list[str]]:
    """Return what DDP_HOOKS_SANITIZE adds to compiling and to linking."""
    sanitizers = os.environ.get("DDP_HOOKS_SANITIZE", "")
    if sanitizers not in SANITIZERS:
        wishes = " or ".join(repr(choice) for choice in SANITIZERS if choice)
        sys.exit(f"DDP_HOOKS_SANITIZE: expected {wishes} or nothing, received {sanitizers!r}")
    if not sanitizers:
        return [], []
    # Lines for the reports, and stacks that can be walked. Assertions find what stays within a vector's capacity, and
    # references to Python's objects that are counted without the GIL.
    # Less is optimised, so that a report's frames are those of the source.
    compiling = ["-g1", "-O1", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-D_GLIBCXX_ASSERTIONS"]
    compiling.append("-DPYBIND11_ASSERT_GIL_HELD_INCREF_DECREF")
    return [f"-fsanitize={sanitizers}", *compiling], [f"-fsanitize={sanitizers}"]


def write_build_info() -> None:
    """Record the torch that is compiled against, for the check in ddp_hooks/_extension.py."""
    lines = (
        '"""Written by setup.py: what the extension was built against."""\n',
        f'TORCH_VERSION = "{torch.__version__}"',
        f'TORCH_COMMIT = "{torch.version.git_version}"',
        f"TORCH_CUDA = {torch.version.cuda!r}",
    )
    (ROOT / "ddp_hooks" / "_build_info.py").write_text("\n".join(lines) + "\n")


def built_version() -> str:
    """Return the version of what is built: with the torch that it runs with, as in 0.1.0+pt2.13.0.cpu or .cu130."""
    platform = f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"
    return f"{VERSIONS['__version__']}+pt{torch.__version__.split('+')[0]}.{platform}"


def check_compiler() -> None:
    """Stop with one sentence where there is no C++ compiler."""
    names = [os.environ["CXX"].split()[0]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    if not any(shutil.which(name) for name in names):
        sys.exit(f"ddp_hooks: expected a C++20 compiler, found no {' or '.join(names)}: install g++, or set CXX to one")


def sources(name: str) -> list[str]:
    """List what is compiled for an extension, relative to here; writes the files that take in others."""
    csrc = ROOT / "csrc"
    suffixes = [".cpp", *([".cu"] if WITH_CUDA else [])]
    alone = {path for path in csrc.rglob("*") if path.suffix in suffixes}
    joined = []
    others = {part for extension, parts in BINDINGS.items() for part in parts if extension != name}
    for part_name, patterns in COMPILED_AS_ONE.items():
        parts = [path for pattern in patterns for path in sorted(csrc.glob(pattern))]
        alone.difference_update(parts)
        if part_name in others:
            continue
        path = ROOT / "build" / "joined" / f"{part_name}.cpp"
        text = "".join(f'#include "{part.relative_to(csrc).as_posix()}"\n' for part in parts)
        if part_name in BINDINGS[name]:
            # Optimising what pybind11 makes of them takes a third of their time, and a step passes there a few times.
            text = f'#if defined(__GNUC__) && !defined(__clang__)\n#pragma GCC optimize("O1")\n#endif\n{text}'
        # Left alone where nothing changes, so that nothing is compiled anew.
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        joined.append(path)
    return [str(path.relative_to(ROOT)) for path in [*joined, *sorted(alone)]]


def planted_defects() -> list[setuptools.Extension]:
    """Describe the library that a sanitized build has beside the extension, for tests/campaigns/sanitized.py."""
    compiling, linking = sanitizer_flags()
    if not compiling:
        return []
    sources = ["tests/planted_defects.cpp"]
    return [
        setuptools.Extension(
            "ddp_hooks._planted", sources, extra_compile_args=compiling, extra_link_args=linking, language="c++"
        )
    ]


def pretended_device() -> list[setuptools.Extension]:
    """Describe the device that only tests know (tests/pretend/queues.h), for an ordinary build in a checkout.

    It is written for the inside of one torch.
    """
    folder = ROOT / "tests" / "pretend"
    if not folder.exists() or sanitizer_flags()[0] or WITH_CUDA or not torch.__version__.startswith("2.13."):
        return []
    sources = [*sorted(folder.glob("*.cpp")), ROOT / "csrc" / "testing" / "emulation.cpp"]
    return [
        setuptools.Extension(
            "ddp_hooks_testing._pretend",
            [str(path.relative_to(ROOT)) for path in sources],
            include_dirs=[str(ROOT / "csrc"), str(folder), *cpp_extension.include_paths()],
            library_dirs=cpp_extension.library_paths("cpu"),
            libraries=["c10", "torch", "torch_cpu", "torch_python"],
            extra_compile_args={"cxx": ["-std=c++20", "-O1", "-g0", "-fvisibility=hidden", "-w"]},
            language="c++",
        )
    ]


def extension(name: str) -> setuptools.Extension:
    """Describe `ddp_hooks._C` or `ddp_hooks_testing._C`.

    torch passes the last part of the name to the compiler, so with the same one both share what is compiled.
    """
    warnings_are_errors = os.environ.get("DDP_HOOKS_WERROR") == "1"
    # Who installs this can do nothing about warnings, and looking for them takes a tenth of the time: Python's own
    # flags ask for them, and -w alone only keeps them from being shown.
    warnings = ["-Wall", "-Wextra", "-Werror"] if warnings_are_errors else ["-w", "-Wno-all"]
    # A product is rounded before it is added, as torch does, also where the processor could do both at once.
    cxx = ["-std=c++20", "-O3", "-ffp-contract=off", "-fvisibility=hidden", *warnings]
    nvcc = ["-std=c++20", "-O3", "-Xcompiler", "-fvisibility=hidden,-Wall,-Wextra"]
    # Nothing reads it, but with it in the command everything is compiled anew for another torch, whose headers the
    # compiler leaves out of the dependencies because they are system headers.
    cxx.append(f"-DDDP_HOOKS_BUILT_FOR={torch.__version__}")
    # Python's own flags ask for symbols, which take half of the time of compiling; the last flag counts.
    cxx.append("-g" if os.environ.get("DDP_HOOKS_DEBUG") == "1" else "-g0")
    sanitized, linking = sanitizer_flags()
    cxx += sanitized
    if warnings_are_errors:
        nvcc += ["-Werror", "all-warnings"]
    if WITH_CUDA:
        cxx.append("-DDDP_HOOKS_WITH_CUDA")
    # System headers, so that warnings are about our code only. torch's own pybind11 stands there too: types are not
    # shared with any other pybind11.
    for path in cpp_extension.include_paths():
        cxx += ["-isystem", path]
    # Of CUDA only its runtime is linked: streams, events and memory are torch's.
    return setuptools.Extension(
        name,
        sources(name),
        include_dirs=[str(ROOT / "csrc")],
        library_dirs=cpp_extension.library_paths("cuda" if WITH_CUDA else "cpu"),
        libraries=["c10", "torch", "torch_cpu", "torch_python"] + (["cudart"] if WITH_CUDA else []),
        extra_compile_args={"cxx": cxx, "nvcc": nvcc},
        extra_link_args=linking,
        language="c++",
    )


class Build(cpp_extension.BuildExtension):
    """Says what it is doing, because it takes a minute or two, and does it once."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.inplace:
            # For an editable install pip chooses a folder that is gone afterwards: the next build would begin anew.
            self.build_temp = str(ROOT / "build" / "objects")

    def build_extensions(self) -> None:
        kernels = f"CUDA {torch.version.cuda}" if WITH_CUDA else "the CPU"
        print(f"ddp_hooks: compiling for torch {torch.__version__} and {kernels}; a minute or two", flush=True)
        super().build_extensions()


if {"sdist", "egg_info"} & set(sys.argv):
    # To be compiled by somebody else, or asked what it is.
    setuptools.setup(version=VERSIONS["__version__"], install_requires=[VERSIONS["torch_requirement"]()])
else:
    check_compiler()
    write_build_info()
    extensions = list(BINDINGS) if os.environ.get("DDP_HOOKS_TESTING") == "1" else ["ddp_hooks._C"]
    setuptools.setup(
        version=built_version(),
        install_requires=[f"torch=={torch.__version__.split('+')[0]}"],
        ext_modules=[
            *map(extension, extensions),
            *planted_defects(),
            *(pretended_device() if len(extensions) > 1 else []),
        ],
        cmdclass={"build_ext": Build},
    )
