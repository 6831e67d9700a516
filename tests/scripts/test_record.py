"""scripts/record.py appends figures with all that is needed to read them later."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax

SCRIPT = Path(__file__).parents[2] / "scripts" / "record.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("record", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_entries_are_appended_with_their_facts(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    script = load()
    script.record("decode", 1.23456789, "ms", path=file, engine="jaxllm")
    script.record("prefill", 5.0, "tok/s", path=file)
    first, second = json.loads(file.read_text())
    assert (first["workload"], first["figure"], first["unit"]) == ("decode", 1.2346, "ms")
    assert first["engine"] == "jaxllm"
    assert first["versions"]["jax"] == jax.__version__
    assert first["device"] == jax.devices()[0].device_kind
    assert set(second) >= {"commit", "date", "device", "versions"}


def test_the_recorded_figures_of_the_h200_are_complete() -> None:
    for entry in json.loads((SCRIPT.parents[1] / "benchmarks" / "h200.json").read_text()):
        assert {"workload", "figure", "unit", "commit", "date", "device", "versions"} <= set(entry)
        assert entry["device"] == "NVIDIA H200"
