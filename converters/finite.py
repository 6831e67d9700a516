"""A scan for NaN and infinite values while a checkpoint is loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.converters.checkpoint import Checkpoint, Source, TensorInfo
from jaxllm.converters.errors import LoadError
from jaxllm.converters.load_report import merge_numbers

_CHUNK_VALUES = 2**20
# The exponent bits, all ones in NaN and infinity. Several times faster than isfinite.
_EXPONENTS = {"float64": 0x7FF << 52, "float32": 0xFF << 23, "float16": 0x1F << 10,
              "bfloat16": 0xFF << 7, "float8_e5m2": 0x1F << 2}  # fmt: skip


class FiniteScan:
    """A Checkpoint that counts the values that are not finite in all tensors read from it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.found: dict[str, int] = {}

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def source(self) -> Source:
        return self.checkpoint.source

    @property
    def config(self) -> dict[str, Any]:
        return self.checkpoint.config

    @property
    def generation_config(self) -> dict[str, Any]:
        return self.checkpoint.generation_config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.checkpoint.tensors

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        tensor = self.checkpoint.read(name, index)
        if count := count_not_finite(tensor):
            self.found[name] = self.found.get(name, 0) + count
        return tensor

    def check(self) -> None:
        """Raises LoadError with the names of all bad tensors read so far."""
        if not self.found:
            return
        order = [name for name in self.tensors if name in self.found]
        entries = [(name, f"{self.found[name]:,} of {self._size(name):,} values") for name in order]
        lines = [f"  {name}  {detail}" for name, detail in merge_numbers(entries)]
        raise LoadError(
            "\n".join(
                [f"{self.path} holds NaN or infinite values in {len(order)} tensors:", *lines]
            )
            + "\nGet the weights anew, or start without --verify-weights finite."
        )

    def _size(self, name: str) -> int:
        return int(np.prod(self.tensors[name].shape))


def count_not_finite(tensor: np.ndarray) -> int:
    """How many values are NaN or infinite, counted in chunks; 0 for anything but floats."""
    if "float" not in tensor.dtype.name or not tensor.size:
        return 0
    exponent = _EXPONENTS.get(tensor.dtype.name)
    if exponent is not None:
        tensor = tensor.view(f"u{tensor.dtype.itemsize}")
    rows = np.atleast_1d(tensor)
    step = max(1, _CHUNK_VALUES * len(rows) // rows.size)
    count = 0
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        if exponent is None:
            count += part.size - int(np.count_nonzero(np.isfinite(part)))
        else:
            mask = part.dtype.type(exponent)
            count += int(np.count_nonzero((part & mask) == mask))
    return count
