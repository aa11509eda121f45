"""What serves a registered module.

Start with :mod:`~ddp_hooks.serving.service`: a service belongs to one module, holds its engine, and is made by
:func:`ddp_hooks.register`. The other files are what it stands on: what a module has to fulfil (``registration``), what
ranks tell each other (``agreement``, ``absentees``), how they connect (``groups``, ``endpoints``, ``control_groups``),
what the engine is told (``engine_settings``, ``collective_costs``), and how DDP is read (``reducer``, ``ddp_methods``).
"""
