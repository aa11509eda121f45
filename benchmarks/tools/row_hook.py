"""The hook that skips rows in thirty lines of Python, to compare with: what anyone would write first.

In each bucket ranks agree, byte by byte, on the rows in which some rank has a non-zero; those are gathered, all-reduced
and put back. Whatever has one dimension is sent whole. It waits for each bucket's masks inside the hook.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tools.usage import rows_with_nonzero


def attach(ddp: DistributedDataParallel) -> None:
    def rows_prototype(group, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        bucket.buffer().div_(dist.get_world_size(group))
        gradients = bucket.gradients()
        whole = [g for g in gradients if g.dim() < 2]
        tall = [g for g in gradients if g.dim() > 1]
        masks: list[torch.Tensor] = []
        if tall:
            agreed = torch.cat([rows_with_nonzero(g) for g in tall]).byte()
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
            masks = list(agreed.bool().split([len(g) for g in tall]))
        parts = [g.flatten() for g in whole] + [g[mask].flatten() for g, mask in zip(tall, masks, strict=True)]
        message = torch.cat(parts)

        def put_back(future):  # type: ignore[no-untyped-def]
            returned = iter(message.split([part.numel() for part in parts]))
            for gradient in whole:
                gradient.copy_(next(returned).view_as(gradient))
            for gradient, mask in zip(tall, masks, strict=True):
                gradient[mask] = next(returned).view(-1, *gradient.shape[1:])
            return bucket.buffer()

        return dist.all_reduce(message, group=group, async_op=True).get_future().then(put_back)

    ddp.register_comm_hook(dist.group.WORLD, rows_prototype)
