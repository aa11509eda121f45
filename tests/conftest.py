"""Makes tests/spawn.py and tests/training.py importable, also in the rank processes."""

import os
import sys
from pathlib import Path

_here = str(Path(__file__).parent)
sys.path.insert(0, _here)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_here, os.environ.get("PYTHONPATH", "")]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
