"""Packers written from the formats' published layouts, one number at a time.

Each takes a matrix [out, in] and gives the stored tensors by suffix and the weight that they stand
for, by the format's own formula in float32.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Tensors = dict[str, np.ndarray]
Packer = Callable[[np.ndarray], tuple[Tensors, np.ndarray]]

GROUP = 16
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
# fmt: off
NF4 = np.array([
    -1, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1,
], np.float32)
# fmt: on


@dataclass(frozen=True)
class Case:
    """A scheme: its quantization_config and its packer."""

    name: str
    config: dict[str, Any]
    pack: Packer

    def __str__(self) -> str:
        return self.name


def words(rows: np.ndarray, bits: int) -> np.ndarray:
    """Each row's codes as one number, lowest first, cut into 32-bit words."""
    packed = []
    for row in rows.tolist():
        number = sum(code << (bits * at) for at, code in enumerate(row))
        size = -(-len(row) * bits // 32)
        packed.append([(number >> (32 * at)) & 0xFFFFFFFF for at in range(size)])
    return np.array(packed, np.uint32).view(np.int32)


def quantize(
    weight: np.ndarray, bits: int, group: np.ndarray, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unsigned codes [out, in], zeros [out, groups] and float16 scales [out, groups]."""
    top, groups = 2**bits - 1, int(group.max()) + 1
    outputs = len(weight)
    zeros, scales = np.zeros((outputs, groups), int), np.zeros((outputs, groups), np.float16)
    for g in range(groups):
        part = weight[:, group == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            scales[:, g] = 2 * np.maximum(-low, high) / top + 1e-3
            zeros[:, g] = (top + 1) // 2
        else:
            scales[:, g] = (high - low) / top + 1e-3
            zeros[:, g] = np.clip(np.round(-low / scales[:, g]), 1, top)
    wide = scales.astype(np.float32)
    codes = np.round(weight / wide[:, group]) + zeros[:, group]
    return np.clip(codes, 0, top).astype(int), zeros, scales


def value_of(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: np.ndarray
) -> np.ndarray:
    return ((codes - zeros[:, group]) * scales.astype(np.float32)[:, group]).astype(np.float32)


def in_order(weight: np.ndarray, size: int = GROUP) -> np.ndarray:
    return np.arange(weight.shape[1]) // (weight.shape[1] if size == -1 else size)


def awq(weight: np.ndarray, size: int = GROUP) -> tuple[Tensors, np.ndarray]:
    group = in_order(weight, size)
    codes, zeros, scales = quantize(weight, 4, group, symmetric=False)
    column_of_field = np.array([0, 2, 4, 6, 1, 3, 5, 7])

    def interleaved(rows: np.ndarray) -> np.ndarray:
        return words(
            rows.reshape(len(rows), -1, 8)[:, :, column_of_field].reshape(len(rows), -1), 4
        )

    tensors = {
        "qweight": interleaved(codes.T),
        "qzeros": interleaved(zeros.T),
        "scales": scales.T.copy(),
    }
    return tensors, value_of(codes, zeros, scales, group)


def gptq(
    weight: np.ndarray,
    *,
    bits: int = 4,
    symmetric: bool = False,
    version: int = 1,
    order: str = "desc_act",
    size: int = GROUP,
) -> tuple[Tensors, np.ndarray]:
    group = in_order(weight, size)
    if order == "desc_act":
        group = np.random.default_rng(7).permutation(group)
    codes, zeros, scales = quantize(weight, bits, group, symmetric)
    stored = (zeros - 1) % 2**bits if version == 1 else zeros
    tensors = {
        "qweight": words(codes, bits).T.copy(),
        "qzeros": words(stored.T, bits),
        "scales": scales.T.copy(),
    }
    if order != "none":
        tensors["g_idx"] = group.astype(np.int32)
    return tensors, value_of(codes, zeros, scales, group)


def compressed_packed(
    weight: np.ndarray, *, bits: int = 4, symmetric: bool = True, size: int = GROUP
) -> tuple[Tensors, np.ndarray]:
    group = in_order(weight, size)
    codes, zeros, scales = quantize(weight, bits, group, symmetric)
    tensors = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales.astype(ml_dtypes.bfloat16),
        "weight_shape": np.array(weight.shape, np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.T, bits).T.copy()
    return tensors, value_of(codes, zeros, tensors["weight_scale"], group)


def compressed_int8(weight: np.ndarray, symmetric: bool = True) -> tuple[Tensors, np.ndarray]:
    group = in_order(weight, -1)
    codes, zeros, scales = quantize(weight, 8, group, symmetric)
    tensors = {"weight": (codes - 128).astype(np.int8), "weight_scale": scales}
    if not symmetric:
        tensors["weight_zero_point"] = (zeros - 128).astype(np.int8)
    return tensors, value_of(codes, zeros, scales, group)


def fp8(
    weight: np.ndarray, scale: str, rows: int, columns: int, shape: tuple[int, ...] | None = None
) -> tuple[Tensors, np.ndarray]:
    """A factor for each block of rows x columns; stored in `shape` if it is given."""
    factors = np.zeros((-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)), np.float32)
    codes, values = np.zeros(weight.shape, FP8), np.zeros(weight.shape, np.float32)
    for i in range(factors.shape[0]):
        for j in range(factors.shape[1]):
            block = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            factors[i, j] = np.abs(weight[block]).max() / 448
            codes[block] = (weight[block] / factors[i, j]).astype(FP8)
            values[block] = codes[block].astype(np.float32) * factors[i, j]
    return {"weight": codes, scale: factors.reshape(shape or factors.shape)}, values


def bnb_four_bit(weight: np.ndarray, nested: bool, block: int = 64) -> tuple[Tensors, np.ndarray]:
    flat = weight.reshape(-1)
    starts = range(0, flat.size, block)
    absmax = np.array([np.abs(flat[at : at + block]).max() for at in starts], np.float32)
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": block,
        "dtype": "bfloat16",
        "shape": list(weight.shape),
    }
    tensors: Tensors = {"weight.absmax": absmax, "weight.quant_map": NF4}
    if nested:
        offset, levels = float(absmax.mean()), np.linspace(-1, 1, 256, dtype=np.float32)
        rest = absmax - np.float32(offset)
        starts = range(0, rest.size, 256)
        tops = np.array([np.abs(rest[at : at + 256]).max() for at in starts], np.float32)
        top = np.repeat(tops, 256)[: rest.size]
        codes = np.abs((rest / top)[:, None] - levels).argmin(1).astype(np.uint8)
        absmax = levels[codes] * top + np.float32(offset)
        state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
        tensors |= {
            "weight.absmax": codes,
            "weight.nested_absmax": tops,
            "weight.nested_quant_map": levels,
        }
    scale = np.repeat(absmax, block)[: flat.size]
    codes = np.abs((flat / scale)[:, None] - NF4).argmin(1)
    tensors["weight"] = (codes[::2] * 16 + codes[1::2]).astype(np.uint8)[:, None]
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = text.copy()
    return tensors, (NF4[codes] * scale).reshape(weight.shape)


def bnb_int8(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    top = np.abs(weight).max(1).astype(np.float32)
    codes = np.round(weight * (127 / top)[:, None]).astype(np.int8)
    tensors = {"weight": codes, "SCB": top, "weight_format": np.array(0, np.uint8)}
    return tensors, codes.astype(np.float32) * top[:, None] / np.float32(127)
