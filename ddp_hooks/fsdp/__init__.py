"""Serves modules with FSDP2: reduce-scatters send only non-zero gradients, and code them between hosts.

::

    for block in model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    state = ddp_hooks.fsdp.register(model)
    ...
    print(state.stats())

See docs/fsdp.md.
"""

from .state import ShardState, register

__all__ = ["ShardState", "register"]
