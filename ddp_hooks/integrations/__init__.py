"""The hook in other people's training loops, which wrap the model themselves: a room a trainer, imported by name.

``ddp_hooks.integrations.lightning`` and ``ddp_hooks.integrations.transformers`` have a callback each, which needs that
package. Accelerate hands the wrapped module back, and :func:`ddp_hooks.register` takes it as it is.
"""
