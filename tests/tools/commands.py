"""Runs commands."""

from __future__ import annotations

import functools
import subprocess

# Keeps what is printed, as text; whatever the exit code.
run_captured = functools.partial(subprocess.run, capture_output=True, text=True)
