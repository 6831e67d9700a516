"""The value types of GGUF tensors: which can be read, and their values."""

import functools

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

NATIVE_DTYPES = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}


def dequantize_rows(rows: np.ndarray, ggml_type: GGMLQuantizationType) -> np.ndarray:
    """The values of u8[rows, bytes of a row], as [rows, values of a row].

    Floats stay what they are; blocks become f32. The gguf package works through 16 rows at a
    time: the blocks are laid out anew so that this is a piece that fits the cache (three times
    faster than rows of a small model).
    """
    if ggml_type in NATIVE_DTYPES:
        return rows.view(NATIVE_DTYPES[ggml_type])
    values, nbytes = GGML_QUANT_SIZES[ggml_type]
    blocks = np.ascontiguousarray(rows).reshape(-1, nbytes)
    row = max(1, 4096 // values)
    whole = len(blocks) // row * row
    parts = [
        dequantize(part, ggml_type).reshape(-1)
        for part in (blocks[:whole].reshape(-1, row * nbytes), blocks[whole:])
        if len(part)
    ]
    flat = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.float32), *parts])
    return flat.reshape(len(rows), rows.shape[1] // nbytes * values)


@functools.cache
def can_dequantize(ggml_type: GGMLQuantizationType) -> bool:
    """Whether the gguf package turns blocks of this type into numbers; found out by trying."""
    block = np.zeros((1, GGML_QUANT_SIZES[ggml_type][1]), np.uint8)
    try:
        dequantize(block, ggml_type)
    except NotImplementedError:
        return False
    return True


def supported_types() -> list[str]:
    """The names of the types that can be read."""
    return [t.name for t in GGMLQuantizationType if t in GGML_QUANT_SIZES and can_dequantize(t)]
