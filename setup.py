"""Builds the extensions; everything else about the package stands in pyproject.toml.

An extension runs with the very torch that it was compiled against, whichever CUDA that is for: its file says which.
By default that is the torch that is installed; `make wheels` names one of each supported release. Of a torch, only
headers and libraries are used, and nothing is imported. The CUDA kernels are compiled if nvcc is found; neither a GPU
nor a torch with CUDA is needed for that.

Environment:
    DDP_HOOKS_TORCHES     folders of torch packages to compile against, separated by colons, not the installed one.
    DDP_HOOKS_CUDA        1: compile the CUDA kernels or fail; 0: leave them out; unset: if nvcc is found.
    DDP_HOOKS_PTXAS       another ptxas than nvcc's own. What an older one assembles runs with older drivers, too.
    DDP_HOOKS_ANY_TORCH=1 build beside a torch that ddp_hooks is not tested with, to try.
    DDP_HOOKS_WERROR=1    look for compiler warnings, and treat them as errors (CI does).
    DDP_HOOKS_DEBUG=1     keep symbols for a debugger; the extension is then many times as large and takes twice as
                          long.
    DDP_HOOKS_TESTING=1   also build what only tests use, into ddp_hooks_testing (`make build` does).
    DDP_HOOKS_SANITIZE    "address,undefined" or "thread": compile with these sanitizers. Their runtime has to be loaded
                          before Python; `make test-asan` and `make test-tsan` see to that and to a folder of its own.
    CXX, CXXFLAGS, LDFLAGS, CUDA_HOME, MAX_JOBS
                          the compiler and its options, where nvcc is, and how many compilers run at once.
"""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from building import jobs, kernels, torches  # noqa: E402

VERSIONS = runpy.run_path(str(ROOT / "ddp_hooks" / "_version.py"))
CSRC = ROOT / "csrc"
# What needs torch's headers is compiled many rooms at a time, because reading them takes most of the time: half of what
# the largest of these takes. Patterns in csrc/; every other file is compiled by itself.
COMPILED_AS_ONE = {
    "kernels": ["kernels/*.cpp"],
    "detectors_and_transport": ["detectors/*.cpp", "transport/*.cpp"],
    "agreement_and_engine": ["reducer/*.cpp", "agreement/*.cpp", "engine/*.cpp"],
    "bindings_of_kernels": [
        f"bindings/{room}.cpp"
        for room in ("module", "kernels", "layout", "detectors", "transport", "shards", "threads")
    ],
    "bindings_of_engine": [f"bindings/{room}.cpp" for room in ("agreement", "reducer", "engine")],
    "testing": ["testing/*.cpp"],
}
# What includes nothing of torch is compiled once for all of them.
WITHOUT_TORCH = [
    "agreement/mask_codec.cpp",
    *(f"kernels/cpu/{name}.cpp" for name in ("block_hash", "instructions", "stream_copy", "unit_scan")),
    "kernels/cuda/*.cpp",
    "kernels/tensor_hash.cpp",
    "layout/*.cpp",
    "plan/*.cpp",
    "system/*.cpp",
]
# What stands in one of the two extensions only; they link the rest both, and it is compiled once.
BINDINGS = {"ddp_hooks": ("bindings_of_kernels", "bindings_of_engine"), "ddp_hooks_testing": ("testing",)}
SANITIZERS = ("", "address,undefined", "thread")


def is_set(name: str) -> bool:
    """Say whether a switch in the environment is on."""
    return os.environ.get(name) == "1"


def find_torches() -> list[torches.Torch]:
    """Return the torches to compile against, or stop with one sentence."""
    found = torches.find()
    if not found:
        sys.exit(
            "ddp_hooks: expected torch where this is built, found none. The extension runs only with the torch that it "
            "was compiled against: install that one first, and then build beside it, with "
            "`pip install --no-build-isolation`"
        )
    for torch in found:
        if untested := VERSIONS["why_untested"](torch.version):
            sys.exit(untested)
    return found


def find_toolkit() -> kernels.Toolkit | None:
    """Return what compiles the CUDA kernels; None if they are left out."""
    wish = os.environ.get("DDP_HOOKS_CUDA", "")
    if wish not in ("", "0", "1"):
        sys.exit(f"DDP_HOOKS_CUDA: expected 0, 1 or nothing, received {wish!r}")
    if wish == "0":
        return None
    toolkit = kernels.find_toolkit()
    if toolkit is None and wish == "1":
        sys.exit(
            "DDP_HOOKS_CUDA=1: found no nvcc; install the CUDA toolkit, 12.1 or later, or set CUDA_HOME to its folder"
        )
    if toolkit is None:
        print("ddp_hooks: nvcc is not found, so the CUDA kernels are left out and CUDA models will be refused")
    return toolkit


def find_compiler() -> list[str]:
    """Return the C++ compiler, or stop with one sentence."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        if shutil.which(shlex.split(name)[0]):
            return shlex.split(name)
    sys.exit(f"ddp_hooks: expected a C++20 compiler, found no {' or '.join(names)}: install g++, or set CXX to one")


def sanitizer_flags() -> list[str]:
    """Return what DDP_HOOKS_SANITIZE adds to compiling; the first of it to linking, too."""
    sanitizers = os.environ.get("DDP_HOOKS_SANITIZE", "")
    if sanitizers not in SANITIZERS:
        wishes = " or ".join(repr(choice) for choice in SANITIZERS if choice)
        sys.exit(f"DDP_HOOKS_SANITIZE: expected {wishes} or nothing, received {sanitizers!r}")
    if not sanitizers:
        return []
    # Lines for the reports, and stacks that can be walked. Assertions find what stays within a vector's capacity, and
    # references to Python's objects that are counted without the GIL.
    # Less is optimised, so that a report's frames are those of the source.
    flags = ["-g1", "-O1", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-D_GLIBCXX_ASSERTIONS"]
    return [f"-fsanitize={sanitizers}", *flags, "-DPYBIND11_ASSERT_GIL_HELD_INCREF_DECREF"]


def matching(patterns: list[str]) -> list[Path]:
    """List the files in csrc/ that match one of the patterns."""
    return [path for pattern in patterns for path in sorted(CSRC.glob(pattern))]


def write_joined(name: str, parts: list[Path]) -> Path:
    """Write the file that takes in others; it is left alone if nothing changes, so that nothing is compiled anew."""
    path = ROOT / "build" / "joined" / f"{name}.cpp"
    text = "".join(f'#include "{part.relative_to(CSRC).as_posix()}"\n' for part in parts)
    if name.startswith("bindings") or name == "testing":
        # Optimising what pybind11 makes of them takes a third of their time, and a step passes there a few times.
        text = f'#if defined(__GNUC__) && !defined(__clang__)\n#pragma GCC optimize("O1")\n#endif\n{text}'
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


class Build(build_ext):
    """Compiles what has changed, several files at once, and links an extension for each torch."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.inplace:
            # For an editable install pip chooses a folder that is gone afterwards: the next build would begin anew.
            self.build_temp = str(ROOT / "build" / "objects")

    def build_extensions(self) -> None:
        temporary = Path(self.build_temp).resolve()
        self.objects = temporary
        self.compiler_command = find_compiler()
        toolkit = find_toolkit()
        self.image = None
        if toolkit is not None:
            folder = ROOT / "build" / "kernels"
            self.image = kernels.plan(toolkit, CSRC, folder, warnings_are_errors=is_set("DDP_HOOKS_WERROR"))
        names = ", ".join(torch.version for group in GROUPS for torch in group)
        devices = "the CPU alone" if self.image is None else "the CPU and CUDA"
        print(f"ddp_hooks: compiling for torch {names}, and {devices}; a minute or two for each", flush=True)
        try:
            jobs.run_all([self.plan_link(extension) for extension in self.extensions])
        except jobs.Failure as failure:
            sys.exit(str(failure))
        if is_set("DDP_HOOKS_TESTING"):
            # Which of its extensions is loaded; no package, because wheels do not hold it.
            shutil.copy(ROOT / "ddp_hooks_testing" / "__init__.py", Path(self.build_lib) / "ddp_hooks_testing")

    def plan_link(self, extension: Extension) -> jobs.Job:
        """Return the job that links an extension."""
        objects = [self.plan_object(extension.torch, source, flags) for source, flags in extension.files]
        output = Path(self.get_ext_fullpath(extension.name)).resolve()
        linking = [
            *self.compiler_command,
            "-shared",
            *sanitizer_flags()[:1],
            *shlex.split(os.environ.get("LDFLAGS", "")),
        ]
        inputs = [str(job.output) for job in objects]
        libraries = [f"-L{extension.torch.folder / 'lib'}", *(f"-l{name}" for name in torches.LIBRARIES)]
        command = (*linking, *inputs, *libraries, *extension.libraries, "-o", str(output))
        return jobs.Job(output, [], command, objects, log_folder=self.objects / "linked" / output.parent.name)

    def plan_object(self, torch: torches.Torch, source: Path, flags: list[str]) -> jobs.Job:
        """Return the job that compiles one file."""
        is_free = source.name == "without_torch.cpp" or source in matching(WITHOUT_TORCH)
        folder = self.objects / ("any" if is_free else torch.label)
        output = folder / source.relative_to(ROOT).with_suffix(".o")
        command = [
            *self.compiler_command,
            *compiling_flags(),
            *flags,
            f"-I{CSRC}",
            "-include",
            str(CSRC / "system" / "portable.h"),
        ]
        needs = []
        if source.name == "kernels_image.cpp" and self.image is not None:
            command.append(f'-DDDP_HOOKS_KERNELS_IMAGE="{self.image.output}"')
            needs = [self.image]
        if not is_free:
            # System headers, so that warnings are about our code only. torch's own pybind11 stands there too: types are
            # not shared with any other pybind11.
            for path in [*torch.include_folders, Path(sysconfig.get_paths()["include"])]:
                command += ["-isystem", str(path)]
            # The compiler does not list them among the dependencies, but a torch's name is in the command.
            command.append(f"-DDDP_HOOKS_TORCH={torch.label}")
        command += ["-MMD", "-MF", f"{output}.d", "-c", str(source), "-o", str(output)]
        return jobs.Job(output, [source], tuple(command), needs)


def compiling_flags() -> list[str]:
    """Return the options of every file."""
    # Who installs this can do nothing about warnings, and looking for them takes a tenth of the time.
    warnings = ["-Wall", "-Wextra", "-Werror"] if is_set("DDP_HOOKS_WERROR") else ["-w"]
    # A product is rounded before it is added, as torch does, also where the processor could do both at once.
    flags = ["-std=c++20", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-DNDEBUG", *warnings]
    flags.append("-g" if is_set("DDP_HOOKS_DEBUG") else "-g0")
    return [*flags, *sanitizer_flags(), *shlex.split(os.environ.get("CXXFLAGS", ""))]


class Extension(setuptools.Extension):
    """A shared library that is compiled for a torch."""

    def __init__(self, name: str, group: list[torches.Torch], files: list[tuple[Path, list[str]]]) -> None:
        super().__init__(name, [str(path.relative_to(ROOT)) for path, _ in files])
        self.torch = group[0]
        self.files = files
        self.libraries = ["-ldl"]


def python_extension(package: str, group: list[torches.Torch]) -> Extension:
    """Describe `_C` of a package. Its file's name ends in the torches that it serves, for _extension.py to choose."""
    alone = {path for path in CSRC.rglob("*.cpp")}
    free = [path for path in matching(WITHOUT_TORCH) if path.parent.name not in ("cpu", "cuda")]
    alone.difference_update(free)
    files = [write_joined("without_torch", free)]
    others = {part for other, parts in BINDINGS.items() for part in parts if other != package}
    for part_name, patterns in COMPILED_AS_ONE.items():
        parts = [path for path in matching(patterns) if path not in free]
        alone.difference_update(parts)
        if part_name not in others and parts:
            files.append(write_joined(part_name, parts))
    name = "-".join(["_C", *(torch.label for torch in group)])
    return Extension(f"{package}.{name}", group, [(path, []) for path in [*files, *sorted(alone)]])


def planted_defects(group: list[torches.Torch]) -> list[Extension]:
    """Describe the library that a sanitized build has beside the extension, for tests/campaigns/sanitized.py."""
    return [Extension("ddp_hooks._planted", group, [(ROOT / "tests" / "planted_defects.cpp", [])])]


def for_tests(group: list[torches.Torch]) -> list[Extension]:
    """Describe what only tests load.

    That is what asks the extension's parts, a stand-in for CUDA's driver, groups with emulated ranks, and a pretended
    device. The device (tests/pretend/queues.h) is written for the inside of one torch.
    """
    found = [python_extension("ddp_hooks_testing", group)]
    flags = ["-O1", "-w", "-UNDEBUG"]
    emulation = CSRC / "testing" / "emulation.cpp"
    if group is GROUPS[0]:
        # One file includes nothing of torch, and the others are used with one torch only.
        for name, pattern in (("_driver", "kernels/stand_in_driver.cpp"), ("_emulated", "emulated/*.cpp")):
            if paths := sorted((ROOT / "tests").glob(pattern)):
                found.append(Extension(f"ddp_hooks_testing.{name}", group, [(path, flags) for path in paths]))
    folder = ROOT / "tests" / "pretend"
    if folder.exists() and not sanitizer_flags() and group[0].version.startswith("2.13."):
        sources = [(path, [*flags, f"-I{folder}"]) for path in [*sorted(folder.glob("*.cpp")), emulation]]
        found.append(Extension("ddp_hooks_testing._pretend", group, sources))
    return found


COMMANDS_WITHOUT_TORCH = {"sdist", "egg_info", "clean"}
extensions: list[Extension] = []
GROUPS: list[list[torches.Torch]] = []
if not COMMANDS_WITHOUT_TORCH & set(sys.argv):
    GROUPS = torches.group(find_torches())
    find_compiler()
    for each in GROUPS:
        extensions.append(python_extension("ddp_hooks", each))
        extensions += for_tests(each) if is_set("DDP_HOOKS_TESTING") else []
    extensions += planted_defects(GROUPS[0]) if sanitizer_flags() else []
setuptools.setup(
    version=VERSIONS["__version__"],
    install_requires=[VERSIONS["torch_requirement"]()],
    ext_modules=extensions,
    cmdclass={"build_ext": Build},
)
