"""What ``python -m ddp_hooks`` can do: a module for each command, with ``add_to(commands)`` that describes it."""
