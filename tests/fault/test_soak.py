"""The soak benchmark, shortened: what must be equal before and after is equal. Slopes of memory take longer to mean anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.tiny_models import tiny_model_dir

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"
MINUTES = 0.1
TIMEOUT_S = 120.0


@pytest.mark.slow
def test_nothing_grows_under_mixed_load(tmp_path: Path) -> None:
    model_dir = tiny_model_dir("llama", tmp_path)
    argv = [sys.executable, str(SOAK), f"--minutes={MINUTES}", f"--model={model_dir}", "--sample-s=1"]
    run = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    last_line = run.stdout.splitlines()[-1] if run.stdout else ""
    assert last_line.startswith("{"), f"ended without a result\n{run.stdout}\n{run.stderr}"
    result = json.loads(last_line)
    broken = [name for name in result["broken"] if not name.startswith(("rss of", "fd slope of"))]
    assert broken == [], run.stdout
    assert result["pins_end"] == 0
    assert result["master_keys_end"] == result["master_keys_counted"] > 0
    assert min(result["requests"].values()) > 0, "a kind of request was never sent"
