"""AWQ's gemm layout: eight 4-bit weights of eight outputs in a word, with zero points.

A module has qweight i32[in, out / 8], qzeros i32[in / group, out / 8] and scales [in / group, out];
the weight is (code - zero) * scale. The eight columns of a word are interleaved (AutoAWQ:
awq/modules/linear/gemm.py and awq/utils/packing_utils.py).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from jaxllm.converters.quant_layout import (
    FLOATS,
    Layout,
    Parts,
    bad_setting,
    dequantize_groups,
    group_size_in,
    is_listed,
    names_in,
    setting,
    unpack,
)

_BITS = 4
_PER_WORD = 8
_FIELD_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq:
    """The Scheme of quant_method awq.

    Raises:
        CheckpointError: another version than gemm, or other than 4 bits.
    """

    suffixes = ("qweight", "qzeros", "scales")
    unused = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        for key in ("bits", "w_bit"):
            bits = setting(config, key, int, _BITS)
            if bits != _BITS:
                raise bad_setting(key, bits, "is not supported: AWQ has 4 bits")
        for key in ("version", "format"):
            version = setting(config, key, str, "gemm")
            if version.lower() != "gemm":
                raise bad_setting(key, version, "is not supported: only AWQ's gemm layout is")
        self._group_size = group_size_in(config, "group_size", "q_group_size")
        self._ignored = names_in(config, "modules_to_not_convert")

    def ignores(self, module: str) -> bool:
        return is_listed(module, self._ignored)

    def layout(self, parts: Parts) -> Layout | None:
        inputs, words = parts.need("qweight", "int32", ndim=2)
        outputs = words * _PER_WORD
        size = inputs if self._group_size == -1 else self._group_size
        if size == 0 or inputs % size:
            raise parts.bad("qweight", f"has {inputs} inputs, not whole groups of {size}")
        parts.need_shape("qzeros", ("int32",), (inputs // size, words))
        parts.need_shape("scales", FLOATS, (inputs // size, outputs))
        return Layout((outputs, inputs), self.suffixes, partial(_rows, parts))


def _rows(parts: Parts, start: int, stop: int) -> np.ndarray:
    words = (slice(None), slice(start // _PER_WORD, -(-stop // _PER_WORD)))
    codes, zeros = (
        unpack(parts.read(part, words), _BITS, stop - start, _FIELD_OF_COLUMN)
        for part in ("qweight", "qzeros")
    )
    scales = parts.floats("scales", (slice(None), slice(start, stop)))
    return dequantize_groups(np.ascontiguousarray(codes.T), zeros.T, scales.T)
