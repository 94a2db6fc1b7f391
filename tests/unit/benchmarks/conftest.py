from __future__ import annotations

import sys
from pathlib import Path

# Benchmarks import each other as scripts do, from their own directory.
sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
