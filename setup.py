"""Builds the extension against the installed torch; everything else about the package stands in pyproject.toml.

Environment:
    DDP_HOOKS_WERROR=1  treat compiler warnings as errors (CI does).
    MAX_JOBS            how many compilers run at once, as for every torch extension.
"""

import os
from pathlib import Path

import setuptools
import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).parent


def write_build_info() -> None:
    """Record the torch that is compiled against, for the check in ddp_hooks/_extension.py."""
    (ROOT / "ddp_hooks" / "_build_info.py").write_text(
        f'"""Written by setup.py: what the extension was built against."""\n\nTORCH_VERSION = "{torch.__version__}"\n'
    )


def extension() -> setuptools.Extension:
    """Describe the extension `ddp_hooks._C`."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.cpp"))
    sources += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / "cpu").glob("*.cpp"))
    flags = ["-std=c++20", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra"]
    if os.environ.get("DDP_HOOKS_WERROR") == "1":
        flags.append("-Werror")
    # System headers, so that warnings are about our code only. torch's own pybind11 stands there too: types are not
    # shared with any other pybind11.
    for path in cpp_extension.include_paths():
        flags += ["-isystem", path]
    return setuptools.Extension(
        "ddp_hooks._C",
        sources,
        include_dirs=[str(ROOT / "csrc")],
        library_dirs=cpp_extension.library_paths(),
        libraries=["c10", "torch", "torch_cpu", "torch_python"],
        extra_compile_args={"cxx": flags},
        language="c++",
    )


write_build_info()
setuptools.setup(
    ext_modules=[extension()],
    cmdclass={"build_ext": cpp_extension.BuildExtension},
)
