"""Reduces gradients on a device: in 16 bits instead of 32, if all of them are bfloat16 numbers.

With ``param_dtype=torch.bfloat16`` and ``reduce_dtype=torch.float32``, autograd's gradients are bfloat16. FSDP2 then
copies them into memory of that type, each rank sends each owner its part, and the owner adds up in 32 bits. This reads
no gradient to find out, and takes one launch more than torch's reduce-scatter. Torch reduces gradients that have more
bits, such as those that were accumulated over several passes.

Ranks may differ in whether they have accumulated gradients, for example if they left out different parameters in a pass
without reduction. But all of them have to start the same collectives, so they agree on the host first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _current_graph_task_id

from ..serving.control_groups import SmallGroup
from ..statistics import Statistics
from .param_groups import ParamGroup, Participants

NARROW, WIDE = torch.bfloat16, torch.float32


class WideGradients:
    """Agrees on the groups of parameters of which some rank has gradients that are not in bfloat16.

    One message of a backward pass describes all groups, and each reduction takes the answer for its own. The first
    reduction without an answer sends the next message. All ranks reduce in the same order, so they agree on when that
    is. An answer does not outlive its pass, because a group that one pass leaves out may be the first one of the next.

    Args:
        small: a group on the host, of the ranks that reduce.
        groups: the groups of parameters; the same on every rank.
    """

    def __init__(self, small: SmallGroup, groups: Sequence[ParamGroup]) -> None:
        self._small: SmallGroup | None = small
        self._groups = list(groups)
        self._answers: dict[int, bool] = {}
        self._pass = -1  # autograd's number for the pass that they belong to

    def anywhere(self, group: ParamGroup, here: bool) -> bool:
        """Return whether some rank has such gradients of a group that is about to be reduced.

        Args:
            group: the group.
            here: whether this rank has.
        """
        assert self._small is not None
        index = self._groups.index(group)
        now = _current_graph_task_id()
        # Pipelines reduce outside of autograd, without a number.
        if now == -1 or now != self._pass or index not in self._answers:
            self._pass = now
            has = [here if each is group else each.has_wide for each in self._groups]
            flags = torch.tensor(has, dtype=torch.uint8, device="cpu")
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
            self._small.backend.allreduce([flags], options).wait()
            self._answers = dict(enumerate(map(bool, flags.tolist())))
        answer = self._answers.pop(index)
        if here and not answer:
            raise RuntimeError(
                f"ddp_hooks.fsdp: expected gradients of {group.names[0]} in bfloat16, received some in another type, "
                "or some that were accumulated after ranks had agreed on how to send them, because other modules were "
                "reduced in between; call set_requires_gradient_sync on the root module, or register with coded='off'"
            )
        return answer

    def close(self) -> None:
        """Close the group on the host. Sends nothing."""
        self._small = None


class NarrowReduceScatter:
    """The reduce-scatters of one group of parameters on a device.

    Args:
        group: the group.
        wide: what ranks agree on; None if torch reduces everything.
    """

    announced = None  # ranks exchange no masks

    def __init__(self, group: ParamGroup, wide: WideGradients | None) -> None:
        self.statistics = Statistics()
        self._group, self._wide = group, wide
        self._begun: Participants | None = None

    def dtype_of_memory(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the memory that FSDP2 asks for: in each reduction an input's, then an output's."""
        participants = self._group.participants
        if participants is None or participants is self._begun:
            return dtype
        self._begun = participants
        if self._wide is None or dtype != WIDE or self._group.divides_by_itself:
            return dtype
        return WIDE if self._wide.anywhere(self._group, participants.wide) else NARROW

    def __call__(
        self,
        output: torch.Tensor,
        flat: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        participants: Participants,
    ) -> bool:
        """Reduce what is narrow; return False on every rank if torch should reduce.

        Everything is put on the current stream, FSDP2's own for reduce-scatters, to which `received` belongs, too.
        """
        ranks = dist.get_world_size(group)
        sent_bytes = flat.nbytes - flat.nbytes // ranks
        self.statistics += Statistics(
            steps=1,
            buckets_whole=1,
            messages=1,
            dense_bytes=(ranks - 1) * output.nbytes,
            payload_bytes=sent_bytes,
            sent_bytes=sent_bytes,
        )
        if flat.dtype == output.dtype:
            return False
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat, group=group)
        add_up = torch.mean if op == dist.ReduceOp.AVG else torch.sum
        add_up(received.view(ranks, -1), 0, dtype=output.dtype, out=output)
        return True
