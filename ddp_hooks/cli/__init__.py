"""The commands of ``python -m ddp_hooks``: a module for each, whose ``add_to(commands)`` describes it."""
