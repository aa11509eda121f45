"""Reads what compiled kernels say of themselves, out of the file for every GPU that the extension carries."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FAT_BINARY = 0xBA55ED50
ELF, PTX = 2, 1
COMPRESSED = 0x2000  # with LZ4
INFO_OF_PARAMETER, INFO_OF_LARGE_PARAMETER, INFO_OF_THREADS = 0x17, 0x45, 0x05
PREFIX = "ddp_hooks_"


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel of one image."""

    parameters: tuple[tuple[int, int], ...]  # offsets and sizes in bytes
    most_threads: int


@dataclass(frozen=True, slots=True)
class Image:
    """What the file holds for one architecture."""

    kind: int
    architecture: int  # 90 for compute capability 9.0
    data: bytes


def read_images(file: bytes) -> list[Image]:
    """Take the file apart."""
    magic, _, header_bytes, size = struct.unpack_from("<IHHQ", file)
    assert magic == FAT_BINARY
    assert header_bytes + size == len(file)
    images = []
    at = header_bytes
    while at < len(file):
        kind, _, entry_bytes, padded_size, size = struct.unpack_from("<HHIQI", file, at)
        (architecture,) = struct.unpack_from("<I", file, at + 28)
        flags, _, whole_size = struct.unpack_from("<QQQ", file, at + 40)
        data = file[at + entry_bytes : at + entry_bytes + (size or padded_size)]
        images.append(Image(kind, architecture, _unpack(data, whole_size) if flags & COMPRESSED else data))
        at += entry_bytes + padded_size
    return images


def read_kernels(image: Image) -> dict[str, Compiled]:
    """Return what an image that is no PTX says of its kernels, by their names."""
    kernels = {}
    for name, section in _sections(image.data):
        if not name.startswith(f".nv.info.{PREFIX}"):
            continue
        parameters = {}
        most_threads = 0
        for attribute, value in _attributes(section):
            if attribute == INFO_OF_PARAMETER:
                _, ordinal, offset, packed = struct.unpack("<IHHI", value)
                parameters[ordinal] = offset, packed >> 18
            elif attribute == INFO_OF_LARGE_PARAMETER:
                _, ordinal, offset, size = struct.unpack("<IHHI", value)
                parameters[ordinal] = offset, size
            elif attribute == INFO_OF_THREADS:
                x, y, z = struct.unpack("<III", value)
                most_threads = x * y * z
        kernels[name.removeprefix(".nv.info.")] = Compiled(
            tuple(parameters[ordinal] for ordinal in sorted(parameters)), most_threads
        )
    return kernels


class StandIn:
    """The stand-in for CUDA's driver (tests/kernels/stand_in_driver.cpp), which is told what compiled kernels say."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))

    def forget(self) -> None:
        """Begin anew, as a driver that knows no kernels."""
        self._library.stand_in_forget()

    def know(self, kernels: dict[str, Compiled]) -> None:
        """Tell it of the kernels of an image."""
        for name, compiled in kernels.items():
            places = [number for place in compiled.parameters for number in place]
            self._library.stand_in_know(
                name.encode(), compiled.most_threads, len(compiled.parameters), (ctypes.c_uint32 * len(places))(*places)
            )

    def set(self, version: int = 12010, status_of_kernels: int = 0) -> None:
        """Have it say that it is for another CUDA, or that a GPU does not run the kernels."""
        self._library.stand_in_set(version, status_of_kernels)


def prepare_stand_in() -> StandIn:
    """Load the stand-in and tell it of the kernels that the extension carries."""
    import ddp_hooks_testing
    from ddp_hooks_testing import _C

    driver = StandIn(next(path for folder in ddp_hooks_testing.__path__ for path in Path(folder).glob("_driver.*.so")))
    driver.forget()
    driver.know(read_kernels(read_images(_C.kernels_image())[0]))
    return driver


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    (headers,) = struct.unpack_from("<Q", elf, 40)
    size, count, of_names = struct.unpack_from("<HHH", elf, 58)
    fields = [struct.unpack_from("<IIQQQQ", elf, headers + i * size) for i in range(count)]
    names = fields[of_names][4]
    for name, kind, _, _, offset, length in fields:
        text = elf[names + name : elf.index(b"\0", names + name)].decode()
        yield text, b"" if kind == 8 else elf[offset : offset + length]  # without bytes in the file


def _attributes(section: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(section):
        form, attribute, value = struct.unpack_from("<BBH", section, at)
        at += 4
        if form == 4:  # the value is the size of what follows
            yield attribute, section[at : at + value]
            at += value


def _unpack(data: bytes, size: int) -> bytes:
    """Unpack a block of LZ4."""
    whole = bytearray()
    at = 0

    def length(short: int) -> int:
        nonlocal at
        total = short
        while short == 15:
            total += data[at]
            at += 1
            if data[at - 1] != 255:
                break
        return total

    while True:
        token = data[at]
        at += 1
        literals = length(token >> 4)
        whole += data[at : at + literals]
        at += literals
        if at >= len(data):
            break
        distance = data[at] | data[at + 1] << 8
        at += 2
        count = length(token & 15) + 4
        while count > 0:  # what is copied may reach into itself
            piece = whole[-distance : len(whole) - distance + count] if distance > count else whole[-distance:]
            whole += piece[:count]
            count -= len(piece[:count])
    assert len(whole) == size
    return bytes(whole)
