"""GPTQ: 2, 3, 4 or 8-bit weights packed along the input, with zero points and perhaps an order.

A module has qweight i32[in * bits / 32, out], qzeros i32[groups, out * bits / 32], scales [groups,
out] and mostly g_idx i32[in], the group of each input (with desc_act in no simple order). The
weight is (code - zero) * scale. The older format, "gptq", stores zero - 1: one subtraction from
every field of the word, so that a zero of 0 borrows from its neighbour (GPTQModel:
nn_modules/qlinear/__init__.py, utils/model.py, utils/model_dequant.py); "gptq_v2" stores zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.quant_layout import (
    FLOATS,
    Layout,
    Parts,
    bad_setting,
    dequantize_groups,
    group_size_in,
    is_listed,
    matches,
    names_in,
    setting,
    unpack,
    words_of,
)

_BITS = (2, 3, 4, 8)
_FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True)
class _Codes:
    """How a weight's codes are stored; ordered: by g_idx; offset: zeros are less by one."""

    bits: int
    inputs: int
    group_size: int
    ordered: bool
    offset: bool


class Gptq:
    """The Scheme of quant_method gptq.

    Raises:
        CheckpointError: other bits or another format.
    """

    suffixes = ("qweight", "qzeros", "scales", "g_idx")
    unused = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._bits = _bits_in(config)
        self._group_size = group_size_in(config, "group_size")
        self._ordered = setting(config, "desc_act", bool, False)
        self._ignored = names_in(config, "modules_to_not_convert")
        self._dynamic = setting(config, "dynamic", dict, {})
        found = {key: setting(config, key, str, "") for key in ("checkpoint_format", "format")}
        for key, name in found.items():
            if name and name not in _FORMATS:
                raise bad_setting(key, name, f"is not supported: {' and '.join(_FORMATS)} are")
        if config.get("is_marlin_format"):
            raise bad_setting("is_marlin_format", True, "is not supported: save it as gptq")
        if setting(config, "pack_dtype", str, "int32") != "int32":
            raise bad_setting("pack_dtype", config["pack_dtype"], "is not supported: int32 is")
        self._offset = (found["checkpoint_format"] or found["format"] or "gptq") == "gptq"

    def ignores(self, module: str) -> bool:
        return is_listed(module, self._ignored) or self._override(module) is None

    def layout(self, parts: Parts) -> Layout | None:
        override = self._override(parts.module) or {}
        bits = _bits_in(override) if "bits" in override else self._bits
        size = group_size_in(override, "group_size") if "group_size" in override else None
        size = size or self._group_size
        if setting(override, "desc_act", bool, self._ordered) and size != -1:
            parts.need("g_idx")
        return _layout(parts, bits, size, self._offset)

    def _override(self, module: str) -> dict[str, Any] | None:
        """What `dynamic` sets for the module: "-:expression" excepts it, which is None."""
        for pattern, values in self._dynamic.items():
            if pattern.startswith("-:"):
                if matches(pattern[2:], module):
                    return None
            elif matches(pattern.removeprefix("+:"), module):
                if not isinstance(values, dict):
                    raise bad_setting("dynamic", values, "must be an object of settings")
                return values
        return {}


def _bits_in(config: Mapping[str, Any]) -> int:
    bits = setting(config, "bits", int, 0)
    if bits not in _BITS:
        raise bad_setting("bits", bits, f"is not supported: GPTQ has {', '.join(map(str, _BITS))}")
    return bits


def _layout(parts: Parts, bits: int, size: int, offset: bool) -> Layout:
    words, outputs = parts.need("qweight", "int32", ndim=2)
    ordered = "g_idx" in parts and parts.infos["g_idx"].shape != (0,)
    inputs = parts.need("g_idx", "int32", "int64", ndim=1)[0] if ordered else words * 32 // bits
    if words_of(inputs, bits) != words or inputs == 0:
        raise parts.bad(
            "qweight", f"has {words} rows, which hold no {inputs} inputs of {bits} bits"
        )
    groups = 1 if size == -1 else -(-inputs // size)
    parts.need_shape("qzeros", ("int32",), (groups, words_of(outputs, bits)))
    parts.need_shape("scales", FLOATS, (groups, outputs))
    used = ("qweight", "qzeros", "scales", *(["g_idx"] if "g_idx" in parts else []))
    step = inputs if size == -1 else min(size, inputs)
    rows = partial(_rows, parts, _Codes(bits, inputs, step, ordered, offset))
    return Layout((outputs, inputs), used, rows)


def _rows(parts: Parts, stored: _Codes, start: int, stop: int) -> np.ndarray:
    bits, inputs, size = stored.bits, stored.inputs, stored.group_size
    columns = (slice(None), slice(start, stop))
    codes = unpack(parts.read("qweight", columns).T, bits, inputs)
    words = (slice(None), slice(start * bits // 32, words_of(stop, bits)))
    zeros = _zeros(parts.read("qzeros", words), bits, stop - start, stored.offset)
    scales = parts.floats("scales", columns)
    group = np.arange(inputs) // size
    if stored.ordered and not np.array_equal(given := _order(parts), group):
        group = given
    elif inputs % size == 0:
        return dequantize_groups(codes, zeros.T, scales.T)
    values = codes.astype(np.float32)
    values -= zeros.T.astype(np.float32)[:, group]
    values *= scales.T[:, group]
    return values


def _order(parts: Parts) -> np.ndarray:
    """g_idx, checked: an index out of range would be another group's scale."""
    group, groups = parts.read("g_idx"), parts.infos["scales"].shape[0]
    if group.min() < 0 or group.max() >= groups:
        raise CheckpointError(
            f"{parts.module}.g_idx names groups {group.min()} to {group.max()}, "
            f"but the scales have {groups}."
        )
    return group


def _zeros(words: np.ndarray, bits: int, count: int, offset: bool) -> np.ndarray:
    if not offset:
        return unpack(words, bits, count)
    if 32 % bits:
        return (unpack(words, bits, count) + np.uint8(1)) & np.uint8(2**bits - 1)
    ones = np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
    return unpack(np.ascontiguousarray(words).view(np.uint32) + ones, bits, count)
