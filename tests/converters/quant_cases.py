"""Every scheme that loads, and tiny checkpoints stored in them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.quant_formats import QuantizedCheckpoint, dequantized
from jaxllm.converters.safetensors_file import TensorInfo
from tests.converters import quant_packers as packers
from tests.converters.quant_packers import GROUP, Case, Tensors

# Every width is a multiple of 32, as 3-bit packing needs it.
QUANT_SIZES: dict[str, Any] = {
    "intermediate_size": 64,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}


def compressed_config(form: str, bits: int, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def _gptq(name: str, bits: int = 4, **options: Any) -> Case:
    version = options.get("version", 1)
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": options.get("size", GROUP),
        "desc_act": options.get("order", "desc_act") == "desc_act",
        "sym": options.get("symmetric", False),
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    return Case(name, config, partial(packers.gptq, bits=bits, **options))


def _packed(name: str, bits: int, **options: Any) -> Case:
    size, symmetric = options.get("size", GROUP), options.get("symmetric", True)
    strategy = {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
    config = compressed_config("pack-quantized", bits, symmetric=symmetric, **strategy)
    return Case(name, config, partial(packers.compressed_packed, bits=bits, **options))


def _float(name: str, rows: int, columns: int, strategy: str, **options: Any) -> Case:
    config = compressed_config(
        "float-quantized",
        8,
        type="float",
        strategy=strategy,
        block_structure=[rows, columns] if strategy == "block" else None,
    )
    pack = partial(packers.fp8, scale="weight_scale", rows=rows, columns=columns, **options)
    return Case(name, config, pack)


_AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_WHOLE = 10**6
WEIGHT = np.random.default_rng(1).normal(size=(64, 96)).astype(np.float32)

CASES = [
    Case("awq", _AWQ | {"group_size": GROUP}, packers.awq),
    Case("awq, one group", _AWQ | {"group_size": -1}, partial(packers.awq, size=-1)),
    *[_gptq(f"gptq {bits} bit, desc_act", bits) for bits in (2, 3, 4, 8)],
    *[_gptq(f"gptq {bits} bit, v2", bits, version=2, order="plain") for bits in (2, 3, 4, 8)],
    _gptq("gptq, symmetric, no g_idx", symmetric=True, order="none"),
    _gptq("gptq, one group", order="plain", size=-1),
    _gptq("gptq, last group cut", order="plain", size=48),
    _packed("W4A16", 4),
    _packed("W4A16, asymmetric", 4, symmetric=False),
    _packed("W8A16, channel", 8, size=-1),
    _packed("W8A16, asymmetric", 8, symmetric=False),
    Case(
        "int8", compressed_config("int-quantized", 8, strategy="channel"), packers.compressed_int8
    ),
    Case(
        "int8, asymmetric",
        compressed_config("int-quantized", 8, strategy="channel", symmetric=False),
        partial(packers.compressed_int8, symmetric=False),
    ),
    _float("FP8, tensor", _WHOLE, _WHOLE, "tensor", shape=(1,)),
    _float("FP8, channel", 1, _WHOLE, "channel"),
    _float("FP8, block", 24, 20, "block"),
    Case(
        "fp8, block",
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 20]},
        partial(packers.fp8, scale="weight_scale_inv", rows=24, columns=20),
    ),
    Case(
        "fp8, tensor",
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        partial(packers.fp8, scale="weight_scale", rows=_WHOLE, columns=_WHOLE, shape=(1,)),
    ),
    Case("nf4", _BNB, partial(packers.bnb_four_bit, nested=False)),
    Case("nf4, double", _BNB, partial(packers.bnb_four_bit, nested=True)),
    Case("int8 rows", {"quant_method": "bitsandbytes", "load_in_8bit": True}, packers.bnb_int8),
]
BY_NAME = {case.name: case for case in CASES}


class MemoryCheckpoint:
    """A Checkpoint of tensors in memory."""

    path, source = Path("somewhere"), "safetensors"
    generation_config: Mapping[str, Any] = {}

    def __init__(self, quantization: Any, tensors: Tensors) -> None:
        self.config = {"vocab_size": 8}
        if quantization is not None:
            self.config["quantization_config"] = quantization
        self._tensors = tensors
        self.tensors = {n: TensorInfo(t.shape, t.dtype, t.nbytes) for n, t in tensors.items()}

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        return self._tensors[name][index or ()]


def packed(case: Case, weight: np.ndarray, module: str = "m.q_proj") -> tuple[Tensors, np.ndarray]:
    """The stored tensors of one module, under their full names, and the weight."""
    tensors, value = case.pack(weight)
    return {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}, value


def pack_model(tensors: Tensors, case: Case) -> tuple[Tensors, Tensors]:
    """A model's tensors with its layers' matrices packed, and with them dequantized."""
    stored: Tensors = {}
    plain: Tensors = {}
    for name, tensor in tensors.items():
        if ".layers." in name and tensor.ndim == 2:
            parts, plain[name] = packed(case, tensor, name.removesuffix(".weight"))
            stored |= parts
        else:
            stored[name] = plain[name] = tensor
    return stored, plain


def opened(config: Any, tensors: Tensors, quantization: str | None = None) -> QuantizedCheckpoint:
    checkpoint: Any = dequantized(
        MemoryCheckpoint(config, tensors),  # pyright: ignore[reportArgumentType]
        quantization,
    )
    return checkpoint


def refused(config: Any, tensors: Tensors | None = None, quantization: str | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        opened(config, tensors or {}, quantization)
    assert str(caught.value).startswith(("somewhere: ", "--quantization"))
    return str(caught.value)
