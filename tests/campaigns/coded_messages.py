"""Decodes altered messages: each is refused with nothing written, or decodes to something, the same on every processor.

    python tests/campaigns/coded_messages.py --messages 100000
    python tests/campaigns/coded_messages.py --messages 100000 --asan

With ``--asan``, the decoder is the one that `make test-asan` has built, and every access outside of a message or of
what it is decoded to is reported. A message is cut, extended, has bits flipped or bytes replaced, inserted or removed,
mostly where sizes and heads are, or is random. test_coding.py decodes a few of them in every run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "kernels"))


def main() -> int:
    """Decode altered messages, with a sanitizer if asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--asan", action="store_true", help="use the build of `make test-asan`")
    options = parser.parse_args()
    if options.asan:
        from sanitized import is_ours, run_sanitized, shortened

        arguments = [str(HERE), "--messages", str(options.messages), "--seed", str(options.seed)]
        code, reports = run_sanitized("asan", arguments)
        for report in filter(is_ours, reports):
            print(shortened(report))
        return code or int(any(map(is_ours, reports)))
    from test_coding import decode_altered

    refused, decoded = decode_altered(options.messages, options.seed)
    print(f"{refused:,} altered messages were refused, {decoded:,} decoded to something")
    return 0


if __name__ == "__main__":
    sys.exit(main())
