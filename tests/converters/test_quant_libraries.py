"""Weights that the formats' own libraries packed, against what those libraries make of them."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from bitsandbytes import functional, nn
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from jaxllm.converters.checkpoint import open_checkpoint
from tests.converters.quant_cases import opened
from tests.converters.quant_packers import Tensors
from tests.converters.tiny_models import save_model

INT, FLOAT = {"type": "int"}, {"type": "float", "num_bits": 8, "symmetric": True}
W4, W8 = INT | {"num_bits": 4}, INT | {"num_bits": 8}
GROUPS = {"strategy": "group", "group_size": 32}
ROWS, WHOLE = {"strategy": "channel"}, {"strategy": "tensor"}
BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
PACKED, FLOATS, INTS = "pack-quantized", "float-quantized", "int-quantized"
COMPRESSED = [
    *((PACKED, bits | part | {"symmetric": symmetric})
      for bits in (W4, W8) for part in (GROUPS, ROWS) for symmetric in (True, False)),
    (PACKED, W4 | WHOLE | {"symmetric": True}),
    *((FLOATS, FLOAT | part) for part in (ROWS, WHOLE, BLOCKS)),
    *((INTS, W8 | ROWS | {"symmetric": symmetric}) for symmetric in (True, False)),
]  # fmt: skip


def ranges(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest number that share a scale."""
    strategy = str(getattr(args.strategy, "value", args.strategy))
    if strategy == "tensor":
        return weight.amin().reshape(1), weight.amax().reshape(1)
    if strategy == "block":
        rows, columns = args.block_structure
        pad = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
        padded = torch.nn.functional.pad(weight, pad)
        parts = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return parts.amin((1, 3)), parts.amax((1, 3))
    size = args.group_size if strategy == "group" else weight.shape[1]
    parts = weight.unflatten(1, (-1, size))
    return parts.amin(-1), parts.amax(-1)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return tensor.numpy()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("layout", "settings"),
    COMPRESSED,
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_compressed_tensors(layout: str, settings: dict[str, Any]) -> None:
    args = QuantizationArgs(**settings)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(204, 288, generator=torch.Generator().manual_seed(0))
    scale, zero = calculate_qparams(*ranges(weight, args), args)
    compressor: Any = BaseCompressor.get_value_from_registry(layout)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"].numpy()
    assert 0 < np.abs(expected - weight.numpy()).max() < 0.5
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
    tensors: Tensors = {f"m.q_proj.{part}": as_numpy(tensor) for part, tensor in stored.items()}
    found = opened(config, tensors).read("m.q_proj.weight")
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "settings",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        {"load_in_8bit": True},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_bitsandbytes(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A model that transformers quantized and saved."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    plain = save_model(tmp_path / "plain", "Llama", **sizes)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        plain,
        quantization_config=transformers.BitsAndBytesConfig(**settings),
        device_map="cpu",
        dtype=torch.float32,
    )
    model.save_pretrained(tmp_path / "quantized")
    checkpoint = open_checkpoint(str(tmp_path / "quantized"))
    compared = 0
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear4bit):
            assert weight is not None
            expected = functional.dequantize_4bit(weight.data, weight.quant_state)
        elif isinstance(module, nn.Linear8bitLt):
            assert weight is not None
            expected = functional.int8_vectorwise_dequant(weight.data, weight.SCB)
        else:
            continue
        found = checkpoint.read(f"{name}.weight")
        np.testing.assert_allclose(found, expected.float().numpy(), rtol=1e-6, atol=1e-7)
        compared += 1
    assert compared == 14
