"""The same for FSDP2: reduce-scatters that send only what somebody needs, in as many bits as hold it.

::

    for block in model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    state = ddp_hooks.fsdp.register(model)
    ...
    print(state.stats())

docs/fsdp.md says what it does.
"""

from .state import ShardState, register

__all__ = ["ShardState", "register"]
