# What csrc/testing/ shows to tests; `make build` puts the extension beside this file.

from collections.abc import Callable, Sequence
from enum import Enum
from typing import ClassVar

import torch
from torch._C._distributed_c10d import ProcessGroup, Reducer

from ddp_hooks._C import DirectGroup, DirectMessage, Units, UsageMask, Width

# --- kernels; offsets and lengths are in elements ---

# Takes a flat tensor; returns (any non-zero, any -0.0 if all are zero).
def nonzero_scan(arg0: torch.Tensor, /) -> tuple[bool, bool]: ...

# Take the message, the flat tensor, the ranges (offset, length) in it, and for a gather the factor.
def gather_scaled(arg0: torch.Tensor, arg1: torch.Tensor, arg2: Sequence[tuple[int, int]], arg3: float, /) -> None: ...
def scatter(arg0: torch.Tensor, arg1: torch.Tensor, arg2: Sequence[tuple[int, int]], /) -> None: ...
def scatter_add(arg0: torch.Tensor, arg1: torch.Tensor, arg2: Sequence[tuple[int, int]], /) -> None: ...

# Takes a flat tensor and ranges (offset, length) in it; the answer is for each range what nonzero_scan returns.
class PendingScan:
    def wait(self) -> list[tuple[bool, bool]]: ...

def start_scan(arg0: torch.Tensor, arg1: Sequence[tuple[int, int]], /) -> PendingScan: ...

# Slices: (offset, length, unit length). Returns which part of a sample of its units is zero, of each, and which part of
# the others a narrow form holds.
def sample_units(
    flat: torch.Tensor, slices: Sequence[tuple[int, int, int]], widths: bool = False
) -> list[tuple[float, float]]: ...

# --- numbers in fewer bits ---

def narrow_widths(arg0: torch.Tensor, /) -> list[Width]: ...  # of its dtype
def packed_bytes(numel: int, width: Width, element_bytes: int) -> int: ...

# Takes the buffer (uint8), the flat tensor, slices of it: (offset, length, width), and of each a divisor, which counts
# at full width, or of none.
def pack(
    to: torch.Tensor,
    flat: torch.Tensor,
    slices: Sequence[tuple[int, int, Width]],
    divisors: Sequence[float] = (),
    divides: bool = False,
) -> None: ...

class Contribution:
    def __init__(self, offset: int = 0, width: Width = ..., own: bool = False) -> None: ...  # bytes into the buffer

class SliceSum:
    def __init__(
        self,
        flat: torch.Tensor,
        offset: int,
        length: int,
        contributions: Sequence[Contribution],
        divisor: float = 1,
        divides: bool = False,
        adds_zero: bool = False,
    ) -> None: ...

def sum_contributions(arg0: torch.Tensor | None, arg1: Sequence[SliceSum], /) -> None: ...  # the buffer

# So that tests run what processors without AVX2 run; for this extension.
def leave_out_avx2(arg0: bool, /) -> None: ...

# Whether the current stream of a tensor's device is being captured.
def is_capturing(arg0: torch.Tensor, /) -> bool: ...

class HashKernel(Enum):
    FASTEST = ...
    PORTABLE = ...
    SSE2 = ...
    AVX2 = ...

def hash_kernel_is_supported(kernel: HashKernel) -> bool: ...
def hash_bytes(data: bytes, kernel: HashKernel = HashKernel.FASTEST) -> tuple[int, int]: ...

# --- masks of units ---

# The smallest form of a mask, in words of 64 bits, as docs/internals/protocol.md specifies it.
def compress(mask: UsageMask) -> list[int]: ...

# Set union; raises ValueError, with the mask unchanged, when the words are no mask of its size.
def merge_compressed(words: Sequence[int], into: UsageMask) -> None: ...

# --- the CUDA kernels' indexing, played on CPU tensors ---

SLICES_PER_LAUNCH: int

# Arguments as for the real ones; return (launches, chunks, bytes of the widest access), the scan its flags besides.
def rehearse(path: str) -> None: ...
def why_unserved(arg0: torch.device, /) -> str | None: ...
def kernels_image() -> bytes: ...
def emulate_gather_scaled(
    arg0: torch.Tensor, arg1: torch.Tensor, arg2: Sequence[tuple[int, int]], arg3: float, /
) -> tuple[int, int, int]: ...
def emulate_scatter(
    arg0: torch.Tensor, arg1: torch.Tensor, arg2: Sequence[tuple[int, int]], /
) -> tuple[int, int, int]: ...
def emulate_nonzero_scan(
    arg0: torch.Tensor, arg1: Sequence[tuple[int, int]], /
) -> tuple[tuple[int, int, int], list[int]]: ...

# Returns (launches, portions, bytes of the widest access, sectors of 32 bytes loaded), what the scan answers, and which
# units narrow forms do not hold.
def emulate_unit_scan(
    flat: torch.Tensor, offset: int, length: int, unit_length: int, widths: bool = False
) -> tuple[tuple[int, int, int, int], tuple[list[int], list[int]], list[list[int]]]: ...

# Slices: (offset, length, unit length). Returns (launches, warps, bytes of the widest access, sectors of 32 bytes
# loaded), and of each slice how many of its sampled units are zero, and how many of the others each form holds.
def emulate_unit_sample(
    flat: torch.Tensor, slices: Sequence[tuple[int, int, int]], widths: bool = False
) -> tuple[tuple[int, int, int, int], list[int], list[list[int]]]: ...

SAMPLES_PER_LAUNCH: int

# As pack and sum_contributions; the sums are of one dtype, divisor and adds_zero. Return (launches, chunks, bytes of
# the widest access).
def emulate_pack(
    to: torch.Tensor,
    flat: torch.Tensor,
    slices: Sequence[tuple[int, int, Width]],
    divisors: Sequence[float] = (),
) -> tuple[int, int, int]: ...
def emulate_sum_contributions(arg0: torch.Tensor, arg1: Sequence[SliceSum], /) -> tuple[int, int, int]: ...

PACKED_PER_LAUNCH: int
SUMS_PER_LAUNCH: tuple[int, int]  # slices, contributions

# --- DDP's Reducer ---

def probe_reducer(arg0: Reducer, /) -> dict[str, object]: ...

# --- transports ---

# Without collectives: what is started is called, and what is told of an error its text.
class OrderedGroup:
    def __init__(self) -> None: ...
    def take_turn(self) -> int: ...
    def start(self, turn: int, start: Callable[[], None], then: Callable[[str | None], None]) -> None: ...
    def fail(self, reason: str) -> None: ...
    def has_failed(self) -> bool: ...

def elements_in_units(arg0: Units, arg1: UsageMask, /) -> int: ...

class Transport:
    ALL_REDUCE: ClassVar[Transport]
    BROADCAST: ClassVar[Transport]
    BY_OWNER: ClassVar[Transport]
    __members__: ClassVar[dict[str, Transport]]
    def __init__(self, value: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

# Takes a set of ranks, a bit each, the world size, and whether what several contribute may be summed by an owner.
def transport_for(contributors: int, world_size: int, sums: bool, width: Width = ...) -> Transport: ...

# Of a message and the bytes of an element: its payload, and how much of that is narrow.
def bytes_of_direct_message(arg0: DirectMessage, arg1: int, /) -> tuple[int, int]: ...
def contribution_bytes(arg0: DirectGroup, arg1: int, arg2: int, /) -> int: ...  # rank, bytes of an element

# Empty where the group has no backend for the device.
def backend_name(arg0: ProcessGroup, arg1: torch.device, /) -> str: ...
def is_on_streams(arg0: str, arg1: torch.device, /) -> bool: ...

# --- a group that the test plays ---

# As rank `rank` of `ranks`, to whose group `all_reduce` is handed what has to be summed in place. The gradients: each
# parameter, and whether it has a gradient of this step. Returns the numbers of messages, and of bytes of gradients and
# flags.
def average_unmanaged_gradients(
    all_reduce: Callable[[torch.Tensor], None],
    rank: int,
    ranks: int,
    gradients: Sequence[tuple[torch.Tensor, bool]],
    factor: float,
    wait: bool,
    /,
) -> tuple[int, int, int]: ...
