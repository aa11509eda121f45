"""The demo: trains a real model with plain DDP and with ddp_hooks, one step of each in turn, to the same weights.

It starts its ranks itself, prints a table, and draws which parameters were used in which step, above the bytes that
were sent. `make demo` builds and runs it. Its parts are in the folder demo/, next to this file. Run it with

    python examples/demo.py
"""

from __future__ import annotations

import sys

from demo.command import main

if __name__ == "__main__":
    sys.exit(main())
