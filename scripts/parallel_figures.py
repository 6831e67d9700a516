"""What bench_parallel.py's processes measure: kept, printed and recorded beside one device's."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from record import record

TARGETS = {
    ("tp", "TPOT, batch 1"): 0.62,
    ("tp", "decode step, batch 256"): 0.60,
    ("pp", "256 requests U(100,1024)"): 1.7,
}
"""Ratio to one device on two: at most for times, at least for rates."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is spread over devices."""

    tp: int = 1
    pp: int = 1

    def __str__(self) -> str:
        return f"pp={self.pp}" if self.pp > 1 else f"tp={self.tp}"

    @property
    def options(self) -> dict[str, int]:
        """The fields of EngineConfig."""
        return {"tensor_parallel_size": self.tp, "pipeline_parallel_size": self.pp}


ONE = Layout()


def is_time(unit: str) -> bool:
    return unit in ("s", "ms", "us")


def compare(value: float, base: float, unit: str, devices: int) -> dict[str, float]:
    """The ratio to one device's figure, and the efficiency: 1 if n devices are n times as fast."""
    ratio = value / base
    speedup = 1 / ratio if is_time(unit) else ratio
    return {"ratio_to_tp1": round(ratio, 4), "efficiency": round(speedup / devices, 4)}


def verdict(layout: Layout, name: str, unit: str, ratio: float) -> str:
    """Whether a figure meets its target; "" if it has none, as on other than two devices."""
    target = TARGETS.get(("pp" if layout.pp > 1 else "tp", name))
    if target is None or layout.tp * layout.pp != 2:
        return ""
    met = ratio <= target if is_time(unit) else ratio >= target
    return f"target {target}: {'met' if met else 'MISSED'}"


class Figures:
    """All figures of a run, in a file that its processes share.

    Args:
        file: made by the first figure.
        recorded: where `record` appends each as well, if anywhere.
    """

    def __init__(self, file: Path, recorded: Path | None) -> None:
        self._file, self._recorded = file, recorded

    def find(self, model: str, name: str, layout: Layout) -> float | None:
        """The figure, None if it has not been measured."""
        return self._read().get(f"{model}: {name} {layout}")

    def add(
        self, model: str, name: str, layout: Layout, value: float, unit: str, **facts: Any
    ) -> None:
        """Keeps, prints and records a figure, beside one device's if that is known.

        Args:
            facts: are recorded, over engine, dtype and layout, and printed.
        """
        self._file.write_text(json.dumps(self._read() | {f"{model}: {name} {layout}": value}))
        notes = [f"{key} {fact}" for key, fact in facts.items()]
        base = None if layout == ONE else self.find(model, name, ONE)
        if base and value and (is_time(unit) or unit.endswith("/s")):
            compared = compare(value, base, unit, layout.tp * layout.pp)
            ratio, facts = compared["ratio_to_tp1"], facts | compared
            notes += [f"{ratio:.3f} x tp=1 ({base:.3f})"]
            notes += [f"efficiency {compared['efficiency']:.2f}"]
            notes += [verdict(layout, name, unit, ratio)]
        line = f"{model:<14} {layout!s:<4} {name:<36} {value:11.3f} {unit:<13}"
        print(line + ", ".join(note for note in notes if note), flush=True)
        if self._recorded:
            fixed: dict[str, Any] = {"engine": "jaxllm", "dtype": "bfloat16", **asdict(layout)}
            record(f"{model}: {name}", value, unit, path=self._recorded, **(fixed | facts))

    def _read(self) -> dict[str, float]:
        return json.loads(self._file.read_text()) if self._file.exists() else {}
