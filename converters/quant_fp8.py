"""FP8 checkpoints: weights in float8_e4m3fn with a scale for the tensor, an output or a block.

DeepSeek's and Qwen3's form is weight f8[out, in] and weight_scale_inv, a factor (for all its name)
for each block of weight_block_size, the last ones cut off at the edge (transformers:
integrations/finegrained_fp8.py). Others have weight_scale: one factor, or one an output.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from jaxllm.converters.quant_layout import (
    FLOATS,
    Layout,
    Parts,
    as_float32,
    bad_setting,
    is_listed,
    names_in,
    setting,
)

_CODES = ("float8_e4m3fn",)
_SCALES = ("weight_scale_inv", "weight_scale")


class Fp8:
    """The Scheme of quant_method fp8.

    Raises:
        CheckpointError: another float format, or an impossible block.
    """

    suffixes = ("weight", *_SCALES)
    unused = (
        *("input_scale", "act_scale", "activation_scale", "output_scale"),
        *("q_scale", "k_scale", "v_scale", "kv_scale"),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        fmt = setting(config, "fmt", str, "e4m3")
        if fmt not in ("e4m3", "float8_e4m3fn"):
            raise bad_setting("fmt", fmt, "is not supported: e4m3 is")
        block = setting(config, "weight_block_size", list, [])
        if block and not (
            len(block) == 2 and all(type(size) is int and size > 0 for size in block)
        ):
            raise bad_setting("weight_block_size", block, "must be two whole numbers")
        self._block = tuple(block)
        self._ignored = names_in(
            config, "modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"
        )

    def ignores(self, module: str) -> bool:
        return is_listed(module, self._ignored)

    def layout(self, parts: Parts) -> Layout | None:
        scale = next((suffix for suffix in _SCALES if suffix in parts), None)
        if "weight" in parts and scale is None:
            if parts.infos["weight"].dtype.name not in _CODES or self.ignores(parts.module):
                return None
            scale = _SCALES[0] if self._block else _SCALES[1]
        outputs, inputs = parts.need("weight", *_CODES, ndim=2)
        assert scale is not None  # a module has a part, and "weight" is the only other one
        shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (outputs, 1)]
        if self._block and scale == "weight_scale_inv":
            shapes = [(-(-outputs // self._block[0]), -(-inputs // self._block[1]))]
        parts.need_shape(scale, (*FLOATS, "float8_e8m0fnu"), *shapes)
        blocks = None
        if len(shapes) == 1:
            blocks = min(self._block[0], outputs), min(self._block[1], inputs)
        rows = partial(_rows, parts, scale, blocks)
        return Layout((outputs, inputs), ("weight", scale), rows)


def _rows(
    parts: Parts, scale: str, block: tuple[int, ...] | None, start: int, stop: int
) -> np.ndarray:
    values = as_float32(parts.read("weight", (slice(start, stop),)))
    if block is not None:
        factors = parts.floats(scale)[np.arange(start, stop) // block[0]]
        values *= np.repeat(factors, block[1], axis=1)[:, : values.shape[1]]
    elif parts.infos[scale].shape[:1] in ((), (1,)):
        values *= parts.floats(scale).reshape(1, 1)
    else:
        values *= parts.floats(scale, (slice(start, stop),))
    return values
