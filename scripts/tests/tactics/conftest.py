"""Makes `bench` importable as `python scripts/bench` has it."""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2]
for folder in (Path(__file__).parent, SCRIPTS):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
