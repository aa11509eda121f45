"""The demo: the same training with plain DDP and with ddp_hooks, side by side, to the same weights."""
