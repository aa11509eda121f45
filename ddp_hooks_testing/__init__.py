"""What only tests ask of the compiled parts; it belongs to the checkout, and no wheel holds it."""

from pathlib import Path

from ddp_hooks import _extension

_extension.load(__name__, Path(__file__).resolve().parent)
