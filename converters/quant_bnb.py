"""bitsandbytes: 4-bit tables (NF4, FP4) with one absmax a block, and 8-bit rows.

4 bit: weight holds two codes a byte, the first one high, of the flattened matrix; quant_map is the
table; absmax a factor a block, itself quantized where there is a nested_absmax; the numbers lie as
JSON in quant_state.bitsandbytes__nf4. 8 bit: weight i8[out, in] and SCB [out], the rows' largest
values (bitsandbytes: functional.py QuantState, backends/default/ops.py, nn/modules.py).
"""

import json
import math
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

_KINDS = ("nf4", "fp4")
_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in _KINDS)
_STORAGE = ("uint8", "int8", "float16", "bfloat16", "float32")
_MOST_IN_A_BLOCK = 2**16  # bitsandbytes has at most 4096
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")


class BitsAndBytes:
    """The Scheme of quant_method bitsandbytes.

    Raises:
        CheckpointError: another 4-bit table than nf4 and fp4.
    """

    suffixes = (
        *("weight", "SCB", "weight_format", "weight.absmax", "weight.quant_map"),
        *_NESTED,
        *_STATES,
    )
    unused = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        kind = setting(config, "bnb_4bit_quant_type", str, "nf4")
        if kind not in _KINDS:
            raise bad_setting("bnb_4bit_quant_type", kind, "is not supported: nf4 and fp4 are")
        self._four = any(
            setting(config, key, bool, False) for key in ("load_in_4bit", "_load_in_4bit")
        )
        self._ignored = names_in(config, "llm_int8_skip_modules", "modules_to_not_convert")

    def ignores(self, module: str) -> bool:
        return is_listed(module, self._ignored)

    def layout(self, parts: Parts) -> Layout | None:
        state = next((state for state in _STATES if state in parts), None)
        marked = [part for part in parts.infos if part.startswith("weight.")]
        if state or marked:
            return _four_bit(parts, state or _STATES[0])
        if "SCB" in parts or "weight_format" in parts:
            return _eight_bit(parts)
        if parts.infos["weight"].dtype.name in ("uint8", "int8") and not self.ignores(parts.module):
            parts.need(_STATES[0] if self._four else "SCB")
        return None


def _eight_bit(parts: Parts) -> Layout:
    outputs, inputs = parts.need("weight", "int8", ndim=2)
    parts.need_shape("SCB", FLOATS, (outputs,))
    used = ["weight", "SCB"]
    if "weight_format" in parts:
        parts.need_shape("weight_format", ("uint8",), (), (1,))
        used.append("weight_format")
        if int(parts.read("weight_format").reshape(())) != 0:
            raise parts.bad("weight_format", "is not 0: only rows are supported")
    return Layout((outputs, inputs), tuple(used), partial(_eight_bit_rows, parts))


def _eight_bit_rows(parts: Parts, start: int, stop: int) -> np.ndarray:
    values = as_float32(parts.read("weight", (slice(start, stop),)))
    values *= parts.floats("SCB", (slice(start, stop),))[:, None]
    values *= np.float32(1 / 127)
    return values


def _four_bit(parts: Parts, state_part: str) -> Layout:
    state = _state(parts, state_part)
    shape, size = _shape_in(parts, state_part, state), _count(parts, state_part, state, "blocksize")
    if size % 2:
        raise parts.bad(state_part, f"has blocksize {size}, which is odd")
    weights = math.prod(shape)
    blocks = -(-weights // size)
    parts.need("weight", *_STORAGE)
    info = parts.infos["weight"]
    held = math.prod(info.shape) * info.dtype.itemsize
    if held != -(-weights // 2):
        raise parts.bad("weight", f"holds {held} bytes, not two of the {list(shape)} weights each")
    parts.need_shape("weight.quant_map", FLOATS, (16,))
    used = ["weight", "weight.absmax", "weight.quant_map", state_part]
    nested = 0
    if any(part in parts for part in _NESTED) or "nested_blocksize" in state:
        nested = _count(parts, state_part, state, "nested_blocksize")
        if not isinstance(state.get("nested_offset"), float):
            raise parts.bad(state_part, "has no nested_offset")
        parts.need_shape("weight.absmax", ("uint8",), (blocks,))
        parts.need_shape("weight.nested_absmax", FLOATS, (-(-blocks // nested),))
        parts.need_shape("weight.nested_quant_map", FLOATS, (256,))
        used += _NESTED
    else:
        parts.need_shape("weight.absmax", FLOATS, (blocks,))
    offset = float(state["nested_offset"]) if nested else 0.0
    rows = partial(_four_bit_rows, parts, shape[1], size, nested, offset)
    return Layout(shape, tuple(used), rows)


def _four_bit_rows(
    parts: Parts, inputs: int, size: int, nested: int, offset: float, start: int, stop: int
) -> np.ndarray:
    """Whole blocks are dequantized, then cut: rows need not begin with a block."""
    first, last = start * inputs, stop * inputs
    block, end = first // size, -(-last // size)
    packed = parts.read("weight").reshape(-1).view(np.uint8)[block * size // 2 : end * size // 2]
    table = parts.floats("weight.quant_map")
    codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)
    values = table[codes]
    absmax = parts.read("weight.absmax", (slice(block, end),))
    if nested:
        levels = parts.floats("weight.nested_quant_map")[absmax]
        levels *= parts.floats("weight.nested_absmax")[np.arange(block, end) // nested]
        scales = levels + np.float32(offset)
    else:
        scales = as_float32(absmax)
    values *= np.repeat(scales, size)[: values.size]
    return values[first - block * size :][: last - first].reshape(stop - start, inputs)


def _state(parts: Parts, part: str) -> dict[str, Any]:
    parts.need(part, "uint8", ndim=1)
    try:
        state = json.loads(parts.read(part).tobytes())
    except (ValueError, RecursionError) as error:
        raise parts.bad(part, f"is no JSON: {error}") from None
    if not isinstance(state, dict):
        raise parts.bad(part, "holds no JSON object")
    return state


def _shape_in(parts: Parts, part: str, state: dict[str, Any]) -> tuple[int, int]:
    shape = state.get("shape")
    if (
        isinstance(shape, list)
        and len(shape) == 2
        and all(type(size) is int and size > 0 for size in shape)
    ):
        return shape[0], shape[1]
    raise parts.bad(part, f"has the shape {shape!r}, which is no matrix")


def _count(parts: Parts, part: str, state: dict[str, Any], key: str) -> int:
    value = state.get(key)
    if type(value) is int and 0 < value <= _MOST_IN_A_BLOCK:
        return value
    raise parts.bad(part, f"has {key} = {value!r}, which is no number of weights")
