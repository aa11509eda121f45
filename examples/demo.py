"""The demo trains a real model with plain DDP and with ddp_hooks, in turns, to the same weights.

It starts its ranks itself, prints a table, and draws which parameters each step used, above the bytes that were sent.
Run `make demo`, or `python examples/demo.py` in an environment that has ddp_hooks. The parts are in demo/.
"""

import sys

from demo.command import main

if __name__ == "__main__":
    sys.exit(main())
