"""What quantized checkpoints are refused for, each naming the thing."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.converters.errors import CheckpointError
from tests.converters.quant_cases import BY_NAME, WEIGHT, compressed_config, opened, packed, refused
from tests.converters.quant_packers import FP8, Tensors
from tests.converters.tiny_models import error_of, save_model

STATE = "weight.quant_state.bitsandbytes__nf4"


def test_an_unknown_scheme_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    save_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for options in ({}, {"load_format": "dummy"}):
        message = error_of(tmp_path, **options)
        assert "'aqlm' is not supported; there are awq, gptq, compressed-tensors, fp8" in message
        assert str(tmp_path) in message
    assert "'quip' is not supported; there are awq" in error_of(tmp_path, quantization="quip")


@pytest.mark.parametrize("config", [{"bits": 4}, ["awq"], {"quant_method": ["awq"]}, "awq", 7])
def test_a_config_without_a_method_is_refused(config: Any) -> None:
    assert "quantization_config" in refused(config)


SETTINGS = [
    ("awq", {"bits": 8}, "bits = 8 is not supported: AWQ has 4 bits"),
    ("awq", {"version": "gemv"}, "version = 'gemv' is not supported: only AWQ's gemm"),
    ("awq", {"group_size": None}, "lacks group_size"),
    ("awq", {"group_size": 0}, "group_size = 0 must be at least 1"),
    ("awq", {"group_size": "128"}, "group_size = '128' must be of type int"),
    ("awq", {"modules_to_not_convert": [3]}, r"modules_to_not_convert = [3] must be a list of"),
    ("gptq 4 bit, v2", {"bits": 5}, "bits = 5 is not supported: GPTQ has 2, 3, 4, 8"),
    ("gptq 4 bit, v2", {"bits": True}, "bits = True must be of type int"),
    ("gptq 4 bit, v2", {"checkpoint_format": "marlin"}, "'marlin' is not supported: gptq and"),
    ("gptq 4 bit, v2", {"is_marlin_format": True}, "is_marlin_format = True is not supported"),
    ("gptq 4 bit, v2", {"pack_dtype": "int16"}, "pack_dtype = 'int16' is not supported"),
    ("gptq 4 bit, v2", {"dynamic": {"+:(": {}}}, "'(' is no regular expression"),
    ("W4A16", {"format": "marlin-24"}, "format = 'marlin-24' is not supported: pack-quantized"),
    ("W4A16", compressed_config("pack-quantized", 3), "num_bits = 3 of type 'int' is not"),
    ("W4A16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "only dense weights"),
    ("W4A16", {"transform_config": {"config_groups": {}}}, "transform_config = "),
    ("W4A16", {"ignore": ["re:("]}, "'(' is no regular expression"),
    ("fp8, block", {"weight_block_size": [128]}, "weight_block_size = [128] must be two"),
    ("fp8, block", {"fmt": "e5m2"}, "fmt = 'e5m2' is not supported: e4m3 is"),
    ("nf4", {"bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type = 'af4' is not supported"),
]


@pytest.mark.parametrize(("name", "changes", "message"), SETTINGS)
def test_settings_that_do_not_work_are_named(
    name: str, changes: dict[str, Any], message: str
) -> None:
    tensors, _ = packed(BY_NAME[name], WEIGHT)
    assert message in refused(BY_NAME[name].config | changes, tensors)


def cast(dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda tensor: tensor.astype(dtype)


def cut(tensor: np.ndarray) -> np.ndarray:
    return tensor[1:]


def state(**changes: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda tensor: np.frombuffer(
        json.dumps(json.loads(tensor.tobytes()) | changes).encode(), np.uint8
    )


# The case, the tensor, what becomes of it (None: it goes) and the message.
DAMAGES: list[tuple[str, str, Callable[[np.ndarray], np.ndarray] | None, str]] = [
    ("awq", "scales", None, "q_proj.scales is missing"),
    ("awq", "qzeros", None, "q_proj.qzeros is missing"),
    ("awq", "qweight", None, "q_proj.qweight is missing"),
    ("awq", "scales", cut, "scales has shape [5, 64], not [6, 64]"),
    ("awq", "qzeros", cut, "qzeros has shape [5, 8], not [6, 8]"),
    ("awq", "qweight", cut, "qweight has 95 inputs, not whole groups of 16"),
    ("awq", "qweight", cast(np.int64), "qweight is int64, not int32"),
    ("awq", "qweight", np.ravel, "qweight has shape [768], not 2 axes"),
    ("gptq 4 bit, desc_act", "g_idx", None, "q_proj.g_idx is missing"),
    ("gptq 4 bit, desc_act", "scales", None, "scales is missing"),
    ("gptq 4 bit, desc_act", "g_idx", lambda t: t[:80], "12 rows, which hold no 80 inputs"),
    ("gptq 4 bit, desc_act", "scales", cut, "scales has shape [5, 64], not [6, 64]"),
    ("gptq 4 bit, desc_act", "qzeros", cut, "qzeros has shape [5, 8], not [6, 8]"),
    ("W4A16", "weight_scale", None, "weight_scale is missing"),
    ("W4A16", "weight_shape", None, "weight_shape is missing"),
    ("W4A16", "weight_packed", None, "weight_packed is missing"),
    ("W4A16", "weight_packed", cut, "holds no 4-bit weight of shape [64, 96]"),
    ("W4A16", "weight_scale", cut, "weight_scale has shape [63, 6], which does not fit [64, 96]"),
    ("W4A16, asymmetric", "weight_zero_point", None, "weight_zero_point is missing"),
    ("int8", "weight_scale", None, "weight_scale is missing"),
    ("FP8, block", "weight_scale", cut, "weight_scale has shape [2, 5], not [3, 5]"),
    ("fp8, block", "weight_scale_inv", None, "weight_scale_inv is missing"),
    ("fp8, block", "weight_scale_inv", cut, "weight_scale_inv has shape [2, 5], not [3, 5]"),
    ("fp8, tensor", "weight_scale", None, "weight_scale is missing"),
    ("fp8, tensor", "weight", cast(np.float32), "weight is float32, not float8_e4m3fn"),
    ("nf4", "weight.absmax", None, "weight.absmax is missing"),
    ("nf4", "weight.quant_map", None, "weight.quant_map is missing"),
    ("nf4", STATE, None, f"{STATE} is missing"),
    ("nf4", STATE, lambda tensor: tensor[:-1], "is no JSON"),
    ("nf4", STATE, state(shape=[64]), "has the shape [64], which is no matrix"),
    ("nf4", STATE, state(blocksize=None), "has blocksize = None"),
    ("nf4", STATE, state(blocksize=10**12), "has blocksize = 1000000000000"),
    ("nf4", STATE, state(shape=[10**9, 10**9]), "weight holds 3072 bytes"),
    ("nf4", "weight", cut, "weight holds 3071 bytes"),
    ("nf4, double", "weight.nested_absmax", None, "weight.nested_absmax is missing"),
    ("nf4, double", STATE, state(nested_offset=None), "has no nested_offset"),
    ("int8 rows", "SCB", None, "SCB is missing"),
    ("int8 rows", "SCB", cut, "SCB has shape [63], not [64]"),
    ("int8 rows", "weight_format", lambda tensor: tensor + np.uint8(1), "weight_format is not 0"),
]


@pytest.mark.parametrize(("name", "suffix", "change", "message"), DAMAGES)
def test_damaged_parts_are_named(name: str, suffix: str, change: Any, message: str) -> None:
    tensors, _ = packed(BY_NAME[name], WEIGHT)
    tensor = tensors.pop(f"m.q_proj.{suffix}")
    if change:
        tensors[f"m.q_proj.{suffix}"] = change(tensor)
    assert message in refused(BY_NAME[name].config, tensors)


def test_all_incomplete_modules_are_told_at_once() -> None:
    tensors: Tensors = {}
    for i in range(12):
        parts, _ = packed(BY_NAME["awq"], WEIGHT, f"layers.{i}")
        tensors |= parts
        del tensors[f"layers.{i}.scales"]
    message = refused(BY_NAME["awq"].config, tensors)
    assert "12 awq weights cannot be read: layers.0.scales is missing, layers.1." in message
    assert message.endswith("and 4 more.")


def test_a_weight_beside_its_packed_form_is_refused() -> None:
    tensors, _ = packed(BY_NAME["awq"], WEIGHT)
    tensors["m.q_proj.weight"] = WEIGHT
    assert "weight is there beside m.q_proj.qweight" in refused(BY_NAME["awq"].config, tensors)


@pytest.mark.parametrize("wrong", [-1, 6])
def test_an_impossible_group_is_found_when_it_is_read(wrong: int) -> None:
    case = BY_NAME["gptq 4 bit, desc_act"]
    tensors, _ = packed(case, WEIGHT)
    tensors["m.q_proj.g_idx"][3] = wrong
    checkpoint = opened(case.config, tensors)
    with pytest.raises(CheckpointError, match=r"somewhere: m\.q_proj\.g_idx names groups"):
        checkpoint.read("m.q_proj.weight")


@pytest.mark.parametrize("name", ["awq", "gptq 4 bit, v2", "W4A16"])
def test_broken_scales_show_in_the_values(name: str) -> None:
    tensors, expected = packed(BY_NAME[name], WEIGHT)
    scales = next(tensor for part, tensor in tensors.items() if "scale" in part)
    scales[0, 0] = np.inf
    found = opened(BY_NAME[name].config, tensors).read("m.q_proj.weight")
    assert not np.isfinite(found).all()
    np.testing.assert_array_equal(found[1:, 16:], expected[1:, 16:])


@pytest.mark.parametrize("name", ["awq", "int8", "fp8, tensor", "int8 rows"])
def test_weights_without_a_number_are_read_or_refused(name: str) -> None:
    tensors, _ = packed(BY_NAME[name], WEIGHT)
    empty = {
        name: tensor[:, :0] if tensor.ndim == 2 else tensor for name, tensor in tensors.items()
    }
    with contextlib.suppress(CheckpointError):
        opened(BY_NAME[name].config, empty).read("m.q_proj.weight")


def test_float8_without_scales_is_not_guessed() -> None:
    plain = {"m.q_proj.weight": WEIGHT.astype(FP8), "m.norm.weight": WEIGHT[0]}
    message = refused({"quant_method": "fp8"}, plain)
    assert "m.q_proj.weight_scale is missing" in message
    assert "norm" not in message
