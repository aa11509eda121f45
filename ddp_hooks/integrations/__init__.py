"""Registers the hook in trainers that wrap the model themselves. Each trainer has its own module.

``ddp_hooks.integrations.lightning`` and ``ddp_hooks.integrations.transformers`` contain a callback, which needs that
package. Accelerate returns the wrapped module, so :func:`ddp_hooks.register` is enough.
"""
