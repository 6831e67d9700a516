"""The bound on the host's memory holds for a small checkpoint on eight devices."""

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_load.py"


def test_loading_takes_no_more_than_twice_the_largest_tensor() -> None:
    command = [sys.executable, str(SCRIPT), "--size", "200MB", "--devices", "8"]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = re.search(r"^([\d.]+) GB onto 8 devices .* [\d.]+ GB/s", done.stdout)
    assert loaded is not None
    assert 0.2 <= float(loaded[1]) < 0.3  # at least what was asked for
    ratio = re.search(r"MiB, (-?[\d.]+) of it", done.stdout)
    assert ratio is not None
    assert float(ratio[1]) <= 2
