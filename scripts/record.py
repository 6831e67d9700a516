"""Appends measured figures to benchmarks/h200.json."""

import datetime
import importlib.metadata
import json
import subprocess
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "benchmarks" / "h200.json"


def _commit() -> str:
    git = ["git", "-C", str(FILE.parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _versions() -> dict[str, str]:
    versions = {}
    for package in ("jax", "jaxlib", "flax"):
        versions[package] = importlib.metadata.version(package)
    return versions


def record(workload: str, figure: float, unit: str, *, path: Path = FILE, **facts: Any) -> None:
    """Appends one entry: workload, figure, unit, commit, date, device, versions and `facts`."""
    import jax

    entries = json.loads(path.read_text()) if path.exists() else []
    entry: dict[str, Any] = {"workload": workload, "figure": round(figure, 4), "unit": unit} | facts
    entry["commit"] = _commit()
    entry["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    entry["device"] = jax.devices()[0].device_kind
    entry["versions"] = _versions()
    entries.append(entry)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n")
