"""compressed-tensors: packed and plain integers, and FP8, by tensor, output, group or block.

pack-quantized: weight_packed i32[out, words] holds each row's codes, offset to be unsigned, and a
whole number of fields a word; weight_scale [out, groups]; for asymmetric schemes weight_zero_point
i32, packed alike along the outputs; weight_g_idx [in] where groups follow the activations' order;
weight_shape [2]. int-, float- and naive-quantized: weight as int8 or float8, weight_scale, and
perhaps weight_zero_point of the scale's shape. The weight is (code - zero) * scale
(compressed-tensors: compressors/quantized_compressors/, quantization/lifecycle/forward.py).
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
    as_float32,
    bad_setting,
    matches,
    names_in,
    setting,
    unpack,
)

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_PACKED_BITS = (4, 8)
_CODES = ("int8", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class _Group:
    """One of config_groups: the weights of some modules."""

    targets: tuple[str, ...]
    format: str
    bits: int
    symmetric: bool
    block: tuple[int, ...]


class CompressedTensors:
    """The Scheme of quant_method compressed-tensors.

    Raises:
        CheckpointError: a format, number of bits, sparsity or transform that is not supported.
    """

    suffixes = (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_g_idx",
        "weight_shape",
    )
    unused = (
        *(f"{kind}_{part}" for kind in ("input", "output") for part in ("scale", "zero_point")),
        *(f"{kind}_{part}" for kind in "qkv" for part in ("scale", "zero_point")),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        sparsity = setting(config, "sparsity_config", dict, {})
        if sparsity.get("format") not in (None, "dense"):
            raise bad_setting("sparsity_config", sparsity, "is not supported: only dense weights")
        if config.get("transform_config"):
            raise bad_setting("transform_config", config["transform_config"], "is not supported")
        self._ignored = names_in(config, "ignore")
        groups = setting(config, "config_groups", dict, {})
        self._groups = [
            group for name, value in groups.items() if (group := _group(config, name, value))
        ]

    def ignores(self, module: str) -> bool:
        return any(_fits(module, name) for name in self._ignored)

    def layout(self, parts: Parts) -> Layout | None:
        if "weight_packed" in parts:
            return _packed(parts, self._group_of(parts.module))
        if "weight" not in parts:
            parts.need("weight_packed")
        plain = parts.infos["weight"].dtype.name not in _CODES
        if plain and "weight_scale" not in parts:
            return None
        if self.ignores(parts.module) and "weight_scale" not in parts:
            return None
        return _naive(parts, self._group_of(parts.module))

    def _group_of(self, module: str) -> _Group:
        by_name = [g for g in self._groups if any(_fits(module, t) for t in g.targets)]
        found = by_name or [group for group in self._groups if "Linear" in group.targets]
        if not found:
            raise CheckpointError(f"{module} is quantized, but no config_groups entry targets it")
        return found[0]


def _group(config: Mapping[str, Any], name: str, value: Any) -> _Group | None:
    """An entry of config_groups; None if it leaves the weights alone."""
    if not isinstance(value, dict):
        raise bad_setting("config_groups", {name: value}, "must be an object of settings")
    weights = setting(value, "weights", dict, {})
    if not weights:
        return None
    layout = setting(value, "format", str, setting(config, "format", str, ""))
    if layout not in _FORMATS:
        raise bad_setting("format", layout, f"is not supported: {', '.join(_FORMATS)} are")
    bits, kind = setting(weights, "num_bits", int, 8), setting(weights, "type", str, "int")
    allowed = {"int": _PACKED_BITS, "float": (8,)}.get(kind, ())
    if bits not in allowed or (layout == "pack-quantized" and kind != "int"):
        raise bad_setting(
            "num_bits", bits, f"of type {kind!r} is not supported in {layout}: int 4, 8, float 8"
        )
    block = setting(weights, "block_structure", list, [])
    if block and not (len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise bad_setting("block_structure", block, "must be two whole numbers")
    return _Group(
        names_in(value, "targets"),
        layout,
        bits,
        setting(weights, "symmetric", bool, True),
        tuple(block) if setting(weights, "strategy", str, "") == "block" else (),
    )


def _fits(module: str, target: str) -> bool:
    """Whether a target or an ignored name, "re:" before an expression, means the module."""
    if target.startswith("re:"):
        return matches(target[3:], module)
    return target == module


def _packed(parts: Parts, group: _Group) -> Layout:
    per_word = 32 // group.bits
    outputs, words = parts.need("weight_packed", "int32", ndim=2)
    parts.need_shape("weight_shape", ("int64", "int32"), (2,))
    shape = tuple(int(size) for size in parts.read("weight_shape"))
    if shape[0] != outputs or shape[1] < 1 or -(-shape[1] // per_word) != words:
        raise parts.bad(
            "weight_packed",
            f"has shape {[outputs, words]}, which holds no {group.bits}-bit weight of shape "
            f"{list(shape)}",
        )
    scale = _scale_shape(parts, shape)
    groups = scale[1] if len(scale) == 2 else 1
    used = ["weight_packed", "weight_scale", "weight_shape"]
    if not group.symmetric:
        parts.need_shape("weight_zero_point", ("int32",), (-(-outputs // per_word), groups))
        used.append("weight_zero_point")
    elif "weight_zero_point" in parts:
        raise parts.bad("weight_zero_point", "is there, but the weights are said to be symmetric")
    if "weight_g_idx" in parts:
        parts.need_shape("weight_g_idx", ("int32", "int64"), (shape[1],))
        used.append("weight_g_idx")
    return Layout((outputs, shape[1]), tuple(used), partial(_packed_rows, parts, group, shape[1]))


def _packed_rows(parts: Parts, group: _Group, inputs: int, start: int, stop: int) -> np.ndarray:
    half = 2 ** (group.bits - 1)
    values = unpack(parts.read("weight_packed", (slice(start, stop),)), group.bits, inputs)
    values = values.astype(np.float32)
    per_word = 32 // group.bits
    if group.symmetric:
        values -= half
    else:
        words = parts.read("weight_zero_point", (slice(start // per_word, -(-stop // per_word)),))
        zeros = unpack(words.T, group.bits, stop - start).T  # offset by half, like the codes
        values -= _widened(parts, zeros, inputs)
    values *= _widened(parts, _factors(parts, "weight_scale", start, stop), inputs)
    return values


def _naive(parts: Parts, group: _Group) -> Layout:
    shape = parts.need("weight", *_CODES, ndim=2)
    if group.block:
        scale = tuple(-(-size // block) for size, block in zip(shape, group.block, strict=True))
        parts.need_shape("weight_scale", FLOATS, scale)
    else:
        scale = _scale_shape(parts, shape)
    used = ["weight", "weight_scale"]
    if "weight_zero_point" in parts:
        parts.need_shape("weight_zero_point", (*_CODES, "int32", "int64", *FLOATS), scale)
        used.append("weight_zero_point")
    if "weight_g_idx" in parts:
        parts.need_shape("weight_g_idx", ("int32", "int64"), (shape[1],))
        used.append("weight_g_idx")
    block = tuple(map(min, group.block, shape))
    rows = partial(_naive_rows, parts, block, shape[1])
    return Layout((shape[0], shape[1]), tuple(used), rows)


def _naive_rows(
    parts: Parts, block: tuple[int, ...], inputs: int, start: int, stop: int
) -> np.ndarray:
    values = as_float32(parts.read("weight", (slice(start, stop),)))
    for part in ("weight_zero_point", "weight_scale"):
        if part not in parts:
            continue
        if block:
            factor = parts.floats(part)[np.arange(start, stop) // block[0]]
            factor = np.repeat(factor, block[1], axis=1)[:, :inputs]
        else:
            factor = _widened(parts, _factors(parts, part, start, stop), inputs)
        values = values * factor if part == "weight_scale" else values - factor
    return values


def _factors(parts: Parts, part: str, start: int, stop: int) -> np.ndarray:
    """The rows' scales or zero points, [rows or 1, groups]."""
    shape = parts.infos[part].shape
    if len(shape) == 2 and shape[0] > 1:
        return parts.floats(part, (slice(start, stop),))
    return parts.floats(part).reshape(1, -1)


def _scale_shape(parts: Parts, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The scale's shape: a number, or one for each group of inputs, of all rows or of each."""
    scale = parts.need("weight_scale", *FLOATS)
    per_row = len(scale) == 2 and scale[0] in (1, shape[0])
    if scale not in ((), (1,)) and not (per_row and scale[1] and shape[1] % scale[1] == 0):
        raise parts.bad(
            "weight_scale", f"has shape {list(scale)}, which does not fit {list(shape)}"
        )
    return scale


def _widened(parts: Parts, factor: np.ndarray, inputs: int) -> np.ndarray:
    """Scales or zeros [rows, groups] for each input, if there is more than one group."""
    groups = factor.shape[1]
    if groups == 1:
        return factor
    if "weight_g_idx" not in parts:
        return np.repeat(factor, inputs // groups, axis=1)
    index = parts.read("weight_g_idx")
    if -1 in index:  # not set: the groups lie side by side
        return np.repeat(factor, inputs // groups, axis=1)
    if index.min() < 0 or index.max() >= groups:
        raise CheckpointError(
            f"{parts.module}.weight_g_idx names groups {index.min()} to {index.max()}, "
            f"but the scales have {groups}."
        )
    return factor[:, index]
