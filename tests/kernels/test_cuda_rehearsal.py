"""The CUDA kernels' way to a GPU, rehearsed without one.

What is looked at: the file with the compiled kernels, the driver's functions, and launches through a stand-in for the
driver. test_cuda_indexing.py runs all of its cases that way, too.
"""

from __future__ import annotations

import ctypes.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import run_captured
from cubins import ELF, FAT_BINARY, PTX, Compiled, Image, StandIn, prepare_stand_in, read_images, read_kernels

from ddp_hooks import _C
from ddp_hooks_testing import _C as testing

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda", 0)
TIMEOUT_SECONDS = 120
BLOCK_THREADS = 128
MOST_PARAMETER_BYTES = 32764

if not testing.kernels_image():
    pytest.skip("this build has no CUDA kernels, because nvcc was not found", allow_module_level=True)


@pytest.fixture(scope="module")
def images() -> list[Image]:
    return read_images(testing.kernels_image())


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    """Launch through the stand-in, which knows the kernels."""
    driver = prepare_stand_in()
    testing.rehearse(str(driver.path))
    yield driver
    testing.rehearse("")


def test_one_file_is_for_every_gpu(images: list[Image]) -> None:
    """One image for each generation, whose later GPUs run it, too, and PTX for those that are still to come."""
    binaries = [image.architecture for image in images if image.kind == ELF]
    assert {number // 10 for number in binaries} >= {7, 8, 9, 10, 12}
    assert all(number % 10 == 0 for number in binaries if number >= 80)
    (portable,) = [image for image in images if image.kind == PTX]
    assert b".version 8.1" in portable.data
    # Old enough for every GPU but the first generation, which has a binary.
    assert portable.architecture == 80


def test_every_image_has_every_kernel(images: list[Image]) -> None:
    first, *others = [read_kernels(image) for image in images if image.kind == ELF]
    assert len(first) == 29
    for other in others:
        assert other == first
    for name, compiled in first.items():
        assert compiled.most_threads == BLOCK_THREADS, name
        offset, size = compiled.parameters[-1]
        assert offset + size <= (4096 if "small" in name or "scan" in name else MOST_PARAMETER_BYTES) or "large" in name
        assert offset + size <= MOST_PARAMETER_BYTES
    portable = next(image.data for image in images if image.kind == PTX)
    assert all(f".entry {name}(".encode() in portable for name in first)


def test_both_extensions_carry_the_same_kernels() -> None:
    """What is tested here is what users get."""
    loaded = {Path(module.__file__).read_bytes() for module in (_C, testing) if module.__file__}
    assert all(testing.kernels_image() in extension for extension in loaded)
    assert testing.kernels_image().startswith(FAT_BINARY.to_bytes(4, "little"))


def test_nothing_of_cuda_is_linked() -> None:
    for module in (_C, testing):
        assert module.__file__ is not None
        listed = subprocess.run(["readelf", "-d", module.__file__], capture_output=True, text=True, check=True).stdout
        assert "NEEDED" in listed
        assert "cuda" not in listed


def test_the_drivers_functions_are_declared_as_cuda_has_them() -> None:
    header = next(iter(sorted(Path("/usr/local").glob("cuda*/targets/*/include/cuda.h"))), None)
    compiler = shutil.which("c++")
    if header is None or compiler is None:
        pytest.skip("needs a compiler and CUDA's headers")
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'csrc'}", f"-I{header.parent}"]
    done = run_captured([*command, str(ROOT / "tests" / "kernels" / "driver_api.cpp")], timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stderr


def test_a_kernel_with_other_parameters_is_noticed(stand_in: StandIn, images: list[Image]) -> None:
    """Nothing but what the compiled kernel says of itself decides how arguments are read."""
    flat, message = torch.arange(8.0), torch.empty(8)
    name = "ddp_hooks_gather_scaled_small_float32"
    right = read_kernels(images[0])[name]
    (table, table_bytes), (factor, factor_bytes) = right.parameters
    testing.emulate_gather_scaled(message, flat, [(0, 8)], 0.5)
    assert torch.equal(message, flat / 2)
    for wrong, complaint in (
        (Compiled(((table, table_bytes), (factor, 2 * factor_bytes)), 128), "another size"),
        (Compiled(((table, table_bytes - 8), (factor, factor_bytes)), 128), "another size"),
        (Compiled(right.parameters[:1], 128), "fewer parameters"),
        (Compiled(right.parameters, 64), "more threads"),
    ):
        stand_in.know({name: wrong})
        with pytest.raises(RuntimeError, match=complaint):
            testing.emulate_gather_scaled(message, flat, [(0, 8)], 0.5)


def test_an_access_out_of_bounds_is_noticed(stand_in: StandIn) -> None:
    message, flat = torch.empty(8), torch.zeros(8)
    with pytest.raises(RuntimeError, match="twice"):
        testing.emulate_scatter(message, flat, [(0, 5), (3, 3)])


def test_a_thread_gets_the_devices_context(stand_in: StandIn) -> None:
    """Threads that called nothing of CUDA's runtime have none; the stand-in refuses launches without."""
    import threading

    failures: list[BaseException] = []

    def launch() -> None:
        try:
            testing.emulate_scatter(torch.ones(4), torch.zeros(4), [(0, 4)])
        except BaseException as error:
            failures.append(error)

    for _ in range(2):
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join(TIMEOUT_SECONDS)
    assert failures == []


def look_anew(stand_in: StandIn) -> str:
    testing.rehearse(str(stand_in.path))
    return testing.why_unserved(CUDA) or ""


def test_what_a_driver_may_lack(stand_in: StandIn, tmp_path: Path) -> None:
    assert look_anew(stand_in) == ""
    stand_in.set(version=12000)
    said = "expected NVIDIA's driver for CUDA 12.1 or later, found one for CUDA 12.0; update the driver"
    assert look_anew(stand_in).startswith(said)
    stand_in.set(version=13000, status_of_kernels=209)
    assert look_anew(stand_in).startswith("GPU 0 cannot run the kernels (no kernel image is available")
    assert testing.why_unserved(torch.device("cuda")) is None  # of no device in particular
    stand_in.set(version=13000)
    stand_in.forget()
    assert "cannot find the kernel ddp_hooks_copy_small: named symbol not found" in look_anew(stand_in)


def test_without_a_driver() -> None:
    if ctypes.util.find_library("cuda") is not None or torch.cuda.is_available():
        pytest.skip("there is a driver here")
    why = _C.why_unserved(CUDA)
    assert why is not None
    assert why.startswith("CUDA's driver cannot be loaded (libcuda.so.1")
    assert "install NVIDIA's driver, or train on the CPU" in why
