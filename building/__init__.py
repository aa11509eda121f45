"""How ddp_hooks is compiled; setup.py and wheels.py use it."""
