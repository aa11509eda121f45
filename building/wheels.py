"""Makes what is distributed, for the Python that runs this: a wheel for every tested torch, the sources, and checksums.

    python building/wheels.py               # every tested torch, from the package index
    python building/wheels.py --installed   # the installed torch alone, as CI does
    python building/wheels.py 2.13.0 2.15.0

Of each torch only headers and libraries are needed, so its wheel is taken without what it depends on, and what is
needed of it is kept in build/torch. These serve every Python, because the linker reads nothing but the name of
libtorch_python. The wheel is made of the source distribution, in build/wheels, and what is compiled there is kept for
the next time.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from building import kernels, torches  # noqa: E402

TESTED_TORCH: tuple[str, ...] = runpy.run_path(str(ROOT / "ddp_hooks" / "_version.py"))["TESTED_TORCH"]
# CUDA 13's assembler marks kernels with a newer ABI, which drivers for CUDA 12 are not known to read, and it knows no
# GPUs of compute capability 7.0.
ASSEMBLER = "nvidia-cuda-nvcc-cu12==12.9.86"
NEEDED = re.compile(rf"torch/(include/.+|version\.py|lib/lib({'|'.join(torches.LIBRARIES)})\.so)")


def pip(*arguments: str | Path) -> None:
    """Run pip, or stop."""
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *map(str, arguments)], check=True)


def fetch_torch(version: str) -> Path:
    """Return the folder with what is needed of a release."""
    folder = ROOT / "build" / "torch" / version
    if not (folder / "torch" / "version.py").exists():
        print(f"fetching torch {version}", flush=True)
        with tempfile.TemporaryDirectory(dir=ROOT / "build") as temporary:
            pip("download", "--no-deps", "--dest", temporary, f"torch=={version}")
            (wheel,) = Path(temporary).glob("torch-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if NEEDED.fullmatch(name)]
                # What says that all is there comes last.
                archive.extractall(folder, sorted(names, key=lambda name: name == "torch/version.py"))
    return folder / "torch"


def fetch_assembler() -> Path:
    """Return the assembler that the kernels of distributed wheels are made with."""
    folder = ROOT / "build" / "ptxas" / ASSEMBLER
    (found,) = list(folder.glob("nvidia/*/bin/ptxas")) or [None]
    if found is None:
        pip("install", "--no-deps", "--target", folder, ASSEMBLER)
        (found,) = folder.glob("nvidia/*/bin/ptxas")
        found.chmod(0o755)
    return found


def make_source_distribution(dist: Path) -> Path:
    """Make the source distribution."""
    with tempfile.TemporaryDirectory() as temporary:
        # Not in the checkout's own egg-info, which belongs to what is installed from it.
        command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", temporary, "sdist", "--dist-dir"]
        subprocess.run([*command, str(dist)], cwd=ROOT, check=True)
    return next(dist.glob("*.tar.gz"))


def unpack(source: Path) -> Path:
    """Unpack the source distribution beside what was compiled of it before."""
    folder = ROOT / "build" / "wheels"
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as temporary:
        with tarfile.open(source) as archive:
            archive.extractall(temporary)
        (unpacked,) = Path(temporary).iterdir()
        if (folder / "build").exists():
            (folder / "build").rename(unpacked / "build")
        shutil.rmtree(folder, ignore_errors=True)
        unpacked.rename(folder)
    return folder


def platform_tag(extensions: list[Path]) -> str:
    """Return the platform that extensions need: the newest glibc whose functions they call."""
    versions = [(2, 28)]  # of torch's own wheels
    for path in extensions:
        symbols = subprocess.run(["readelf", "-W", "--dyn-syms", path], capture_output=True, text=True, check=True)
        versions += [(int(major), int(minor)) for major, minor in re.findall(r"@GLIBC_(\d+)\.(\d+)", symbols.stdout)]
    major, minor = max(versions)
    return f"manylinux_{major}_{minor}_{os.uname().machine}"


def make_wheel(folder: Path, dist: Path, environment: dict[str, str]) -> Path:
    """Compile the sources in a folder and make the wheel."""
    setup = [sys.executable, "setup.py", "--quiet"]
    libraries = folder / "build" / f"lib-{sys.implementation.cache_tag}"
    shutil.rmtree(libraries, ignore_errors=True)
    subprocess.run([*setup, "build", "--build-lib", libraries], cwd=folder, env=environment, check=True)
    tag = platform_tag(sorted(libraries.rglob("_C-*.so")))
    command = [
        *setup,
        "build",
        "--build-lib",
        libraries,
        "bdist_wheel",
        "--skip-build",
        "--plat-name",
        tag,
        "--dist-dir",
    ]
    subprocess.run([*command, dist], cwd=folder, env=environment, check=True)
    return next(dist.glob("*.whl"))


def make_for_tests(folder: Path, environment: dict[str, str]) -> None:
    """Make ddp_hooks_testing for the same torches, out of what was compiled for the wheel."""
    libraries = folder / "build" / "lib-for-tests"
    shutil.rmtree(libraries, ignore_errors=True)
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-lib", libraries]
    subprocess.run(command, cwd=folder, env={**environment, "DDP_HOOKS_TESTING": "1"}, check=True)
    target = ROOT / "build" / f"for-tests-{sys.version_info.major}.{sys.version_info.minor}"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    (libraries / "ddp_hooks_testing").rename(target / "ddp_hooks_testing")


def main() -> int:
    """Make everything in dist/."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=TESTED_TORCH, help="of torch; every tested one without")
    parser.add_argument("--installed", action="store_true", help="the installed torch instead")
    parser.add_argument("--for-tests", action="store_true", help="also make what only tests load, in build/")
    parser.add_argument("--only-for-tests", action="store_true", help="make nothing else")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where it goes (dist)")
    arguments = parser.parse_args()
    (ROOT / "build").mkdir(exist_ok=True)
    environment = dict(os.environ)
    if arguments.installed:
        environment.pop("DDP_HOOKS_TORCHES", None)
    else:
        environment["DDP_HOOKS_TORCHES"] = os.pathsep.join(str(fetch_torch(version)) for version in arguments.versions)
        if kernels.find_toolkit() is not None:
            environment.setdefault("DDP_HOOKS_PTXAS", str(fetch_assembler()))
    with tempfile.TemporaryDirectory() as temporary:
        dist = Path(temporary) if arguments.only_for_tests else arguments.dist.resolve()
        shutil.rmtree(dist, ignore_errors=True)
        dist.mkdir(parents=True)
        source = make_source_distribution(dist)
        folder = unpack(source)
        if not arguments.only_for_tests:
            wheel = make_wheel(folder, dist, environment)
            sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in (source, wheel)]
            (dist / "SHA256SUMS").write_text("".join(sums))
            print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    if arguments.for_tests or arguments.only_for_tests:
        make_for_tests(folder, environment)
    return 0


if __name__ == "__main__":
    sys.exit(main())
