"""What it means that two runs give the same.

On two ranks: the same bits, but for what architecture.md and protocol.md in docs/internals except. A NaN is a NaN:
which of two NaNs a sum takes its payload from depends on the order of its operands, and gloo adds in another one in
each part of a buffer. (A NaN that is alone keeps its payload, quiet if it was signalling.) Ranks all have the same
payload, which campaign.py sees to. Zeros may have either sign where a
gradient, or a unit of it, is zero in all its elements; in gradients that may be broadcast by units; in complex ones;
and so among a weight's or a buffer's elements. And with gradient_as_bucket_view, what is left in a bucket of an earlier
pass plain DDP halves and adds up again, whoever uses it, so that an odd denormal number loses its last bit; the hook
leaves it alone.

On three ranks and more the order of a sum may differ. What was added is known up to its size, so the tolerance is a
few roundings of the largest gradient that any rank put in; the hook's gradients are then replaced by the oracle's, so
that nothing adds up.
"""

from __future__ import annotations

import zlib

import torch

_ROUNDINGS = 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense, contiguous, real copy on the CPU."""
    return copy_there(tensor).cpu()


def copy_there(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense, contiguous, real copy where the tensor is, without waiting for that."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.contiguous().clone()


def digest(tensor: torch.Tensor | None) -> int:
    """Return a number that stands for a plain copy's bits."""
    return -1 if tensor is None else zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def difference(
    ours: torch.Tensor | None,
    plain: torch.Tensor | None,
    *,
    scale: float | None,
    zero_signs: bool | torch.Tensor,
    left_over: bool = False,
) -> str | None:
    """Say how two plain copies differ.

    Args:
        ours: with the hook.
        plain: without it.
        scale: the size of what was added, where the order of the sum is free; None for the same bits.
        zero_signs: whether zeros may have either sign anywhere, and not only where all elements are zero; or which
            of them may.
        left_over: whether plain DDP may have halved this and added it up again.
    """
    if ours is None or plain is None:
        same = ours is None and plain is None
        return None if same else f"is {_shown(ours)} with the hook, and {_shown(plain)} with plain DDP"
    if ours.dtype != plain.dtype or ours.shape != plain.shape:
        return f"is {ours.dtype} {list(ours.shape)} with the hook, and {plain.dtype} {list(plain.shape)} without"
    integers = _INTEGERS[ours.element_size()]
    same = ours.reshape(-1).view(integers) == plain.reshape(-1).view(integers)
    ours, plain = ours.reshape(-1), plain.reshape(-1)
    if ours.is_floating_point():
        same |= ours.isnan() & plain.isnan()
        zeros = (ours == 0) & (plain == 0)
        if isinstance(zero_signs, torch.Tensor):
            same |= zeros & zero_signs.reshape(-1)
        if zero_signs is True or bool(zeros.all()):
            same |= zeros
        info = torch.finfo(ours.dtype)
        if left_over:
            apart = (ours.double() - plain.double()).abs()
            same |= (plain.abs() < info.smallest_normal) & (apart <= info.smallest_normal * info.eps)
        if scale is not None:
            tolerance = _ROUNDINGS * (info.eps * scale + info.smallest_normal * info.eps)
            same |= (ours.double() - plain.double()).abs() <= tolerance
    if bool(same.all()):
        return None
    at = int((~same).nonzero()[0])
    return (
        f"differs in {int((~same).sum())} of {same.numel()} elements, first at {at}: {ours[at].item()!r} with the "
        f"hook, {plain[at].item()!r} with plain DDP"
    )


def _shown(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "None"
    return "all zeros" if not bool(tensor.count_nonzero()) else f"a tensor with {tensor.reshape(-1)[:3].tolist()}..."
