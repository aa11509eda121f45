"""Serves registered modules.

Start with :func:`ddp_hooks.serving.registration.serve`, which :func:`ddp_hooks.register` calls. The ranks meet
(``absentees``), check their modules (``modules``), compare what they found (``agreement``), and open the groups that
masks travel on (``control_groups``, ``endpoints``, ``groups``). Then a ``service`` gives the module an engine, with
settings made from the policy (``engine_settings``), and keeps it until the module goes. Three files stand beside this
path: ``disabling`` for ``DDP_HOOKS_DISABLE``, ``ddp_methods`` for wrapped methods of DDP, and ``parameters`` for
selectors of parameters.
"""
