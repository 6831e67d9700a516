"""A package that pip installs into a folder of its own, as a user's would be."""

import subprocess
import sys
from pathlib import Path


def pip_install(source: Path, target: Path, files: dict[str, str]) -> Path:
    """Writes `files` into `source`, installs that into `target`, and returns `target`."""
    for name, text in files.items():
        (source / name).write_text(text)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--target", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return target
