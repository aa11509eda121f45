# What csrc/testing/ shows to tests; `make build` puts the extension beside this file.

from collections.abc import Callable, Sequence
from enum import Enum
from typing import ClassVar

import torch
from torch._C._distributed_c10d import Backend, ProcessGroup, Reducer

from ddp_hooks._C import (
    AdaptiveSettings,
    DirectSettings,
    LayoutOfBuckets,
    PlanSettings,
    Units,
    UnitSettings,
    UsageMask,
    When,
)

# --- what a step is planned with ---

class Stretch:
    @property
    def place(self) -> int: ...  # a bucket, or which of the gradients
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...

class Message:
    @property
    def stretches(self) -> list[Stretch]: ...
    @property
    def numel(self) -> int: ...
    @property
    def kind(self) -> int: ...
    @property
    def in_place(self) -> bool: ...
    @property
    def gaps(self) -> list[Stretch]: ...

class Disposition:
    SKIPPED: ClassVar[Disposition]
    PACKED: ClassVar[Disposition]
    WHOLE: ClassVar[Disposition]
    __members__: ClassVar[dict[str, Disposition]]
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

# Which part of its bytes a coded message is expected to take.
class CodedParts:
    def __init__(self, *, contribution: float, sum: float) -> None: ...
    @property
    def contribution(self) -> float: ...
    @property
    def sum(self) -> float: ...

# The same, where what leaves the all-reduces takes these parts of its bytes.
def coded(arg0: DirectSettings, arg1: CodedParts, /) -> DirectSettings: ...

class DirectPart(Stretch):
    @property
    def contributors(self) -> int: ...  # a set of ranks, a bit each

class DirectGroup:
    @property
    def owner(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def parts(self) -> list[DirectPart]: ...

class DirectMessage:
    @property
    def is_summed(self) -> bool: ...
    @property
    def for_all_bytes(self) -> list[int]: ...  # by rank
    @property
    def is_gathered(self) -> bool: ...
    @property
    def is_coded(self) -> bool: ...
    @property
    def numel(self) -> int: ...
    @property
    def groups(self) -> list[DirectGroup]: ...

class BucketPlan:
    @property
    def launches(self) -> list[Message]: ...
    @property
    def direct(self) -> list[DirectMessage]: ...
    @property
    def messages_touching(self) -> int: ...
    @property
    def disposition(self) -> Disposition: ...

def make_reduction_plan(
    layout: LayoutOfBuckets,
    agreed: UsageMask,
    settings: PlanSettings,
    divided: UsageMask | None = None,
    by_rank: Sequence[UsageMask] = [],
) -> list[BucketPlan]: ...
def plan_bucket_by_bucket(
    layout: LayoutOfBuckets,
    agreed: UsageMask,
    settings: PlanSettings,
    divided: UsageMask | None = None,
    by_rank: Sequence[UsageMask] = [],
) -> list[BucketPlan]: ...

# `used` is the mask of all units of all gradients, and `by_rank` what of it each rank uses. Returns the messages that
# are all-reduced and the others; and by gradient how many elements are sent, each counted at what its transport takes
# of a ring's transfers before it is coded.
def make_unit_plan(
    gradients: Sequence[Units],
    used: UsageMask,
    element_bytes: int,
    settings: PlanSettings,
    by_rank: Sequence[UsageMask] = [],
) -> tuple[list[Message], list[DirectMessage], list[float]]: ...

# In which parameters units are agreed on, as the engine asks; gradients it is shown there only.
class UnitsDetector:
    def __init__(self, *, skip_zero_rows: When, units: UnitSettings, adaptive: AdaptiveSettings) -> None: ...
    def use_layout(self, arg0: LayoutOfBuckets, /) -> None: ...
    def least_zero_fraction(self) -> float: ...
    def objections(self, arg0: bool, /) -> UsageMask: ...  # whether there are none
    def choose(self, arg0: UsageMask, arg1: UsageMask, arg2: int, /) -> UsageMask: ...  # used, objections, step
    def is_due(self, arg0: int, arg1: int, /) -> bool: ...  # parameter, the next step
    # Parameter, step, elements; how many are sent, counted at their costs.
    def observe(self, arg0: int, arg1: int, arg2: int, arg3: float, /) -> bool: ...

# In which steps messages are coded.
class CodingRule:
    def __init__(self, *, coded: When, least_saving: float, adaptive: AdaptiveSettings, world_size: int) -> None: ...
    # A mask, bytes of contributions before and after they were coded, and those of sums.
    def tell(self, arg0: UsageMask, arg1: int, arg2: int, arg3: int, arg4: int, /) -> UsageMask: ...
    def choose(self, arg0: int, arg1: UsageMask, /) -> CodedParts | None: ...  # step, the masks of all ranks

# --- kernels; offsets and lengths are in elements ---

# Take the message, the flat tensor, the ranges (offset, length) in it, and for a gather the factor.
def gather_scaled(arg0: torch.Tensor, arg1: torch.Tensor, arg2: Sequence[tuple[int, int]], arg3: float, /) -> None: ...
def scatter(arg0: torch.Tensor, arg1: torch.Tensor, arg2: Sequence[tuple[int, int]], /) -> None: ...
def scatter_add(arg0: torch.Tensor, arg1: torch.Tensor, arg2: Sequence[tuple[int, int]], /) -> None: ...

# Takes a flat tensor and ranges (offset, length) in it, each of which is a unit. The answer for each range: (any
# non-zero, any -0.0 if all are zero).
class ScanOfSlices:
    def wait(self) -> list[tuple[bool, bool]]: ...

def start_scan(arg0: torch.Tensor, arg1: Sequence[tuple[int, int]], /) -> ScanOfSlices: ...

# Slices: (offset, length, unit length). Returns, for each slice, the fraction of its sampled units that are zero.
def sample_units(flat: torch.Tensor, slices: Sequence[tuple[int, int, int]]) -> list[float]: ...

# --- packing ---

# Takes the buffer (uint8), the flat tensor, slices of it: (offset, length), and of each a divisor, or of none.
def pack(
    to: torch.Tensor,
    flat: torch.Tensor,
    slices: Sequence[tuple[int, int]],
    divisors: Sequence[float] = (),
    divides: bool = False,
) -> None: ...

class Contribution:
    def __init__(self, offset: int = 0, own: bool = False) -> None: ...  # bytes into the buffer

class SliceSum:
    def __init__(
        self,
        flat: torch.Tensor,
        offset: int,
        length: int,
        contributions: Sequence[Contribution],
        divisor: float = 1,
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

# Slices: (offset, length, unit length). Returns (launches, portions, bytes of the widest access, sectors of 32 bytes
# loaded), and for each slice what the scan answers.
def emulate_unit_scan(
    flat: torch.Tensor, slices: Sequence[tuple[int, int, int]]
) -> tuple[tuple[int, int, int, int], list[tuple[list[int], list[int]]]]: ...

SCANS_PER_LAUNCH: int

# Slices: (offset, length, unit length). Returns (launches, warps, bytes of the widest access, sectors of 32 bytes
# loaded), and for each slice how many of its sampled units are zero.
def emulate_unit_sample(
    flat: torch.Tensor, slices: Sequence[tuple[int, int, int]]
) -> tuple[tuple[int, int, int, int], list[int]]: ...

SAMPLES_PER_LAUNCH: int

# As sum_contributions; the sums are of one dtype, divisor and adds_zero. Returns (launches, chunks, bytes of the widest
# access).
def emulate_sum_contributions(arg0: torch.Tensor, arg1: Sequence[SliceSum], /) -> tuple[int, int, int]: ...

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
def transport_for(contributors: int, world_size: int, owners: bool, coded: CodedParts | None = None) -> Transport: ...

# Of a message and the bytes of an element: the payload of its contributions, and that of its sums.
def bytes_of_direct_message(arg0: DirectMessage, arg1: int, /) -> tuple[int, int]: ...
def contribution_bytes(arg0: DirectGroup, arg1: int, arg2: int, /) -> int: ...  # rank, bytes of an element

# Empty where the group has no backend for the device.
def backend_name(arg0: ProcessGroup, arg1: torch.device, /) -> str: ...
def is_on_streams(arg0: str, arg1: torch.device, /) -> bool: ...

# A group whose next collective sends what `alter` makes of the bytes that it is given.
class Altering(Backend):
    def __init__(self, group: Backend) -> None: ...
    def alter_next(self, alter: Callable[[torch.Tensor], None]) -> None: ...

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
