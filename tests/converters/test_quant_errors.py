"""What quantized checkpoints are refused for, each naming the thing."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from jaxllm.config import EngineConfig
from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.quant_formats import QuantizedCheckpoint, dequantized
from jaxllm.serve.args import parse_args
from tests.converters.quant_cases import BY_NAME, MemoryCheckpoint, compressed_config, packed
from tests.converters.quant_packers import FP8, Tensors
from tests.converters.tiny_models import error_of, save_model

WEIGHT = np.random.default_rng(1).normal(size=(64, 96)).astype(np.float32)
STATE = "weight.quant_state.bitsandbytes__nf4"


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


# Modules that the config excepts


def test_excepted_modules_are_taken_as_they_are() -> None:
    for name, exception in [
        ("fp8, block", {"modules_to_not_convert": ["m.q_proj"]}),
        ("fp8, block", {"ignored_layers": ["q_proj"]}),
        ("int8", {"ignore": ["re:.*q_proj"]}),
        ("int8 rows", {"llm_int8_skip_modules": ["q_proj"]}),
    ]:
        tensors, _ = packed(BY_NAME[name], WEIGHT)
        codes = tensors["m.q_proj.weight"]
        found = opened(BY_NAME[name].config | exception, {"m.q_proj.weight": codes})
        assert not found.quantized
        np.testing.assert_array_equal(found.read("m.q_proj.weight"), codes)
        assert "missing" in refused(BY_NAME[name].config, {"m.q_proj.weight": codes})


def test_an_excepted_yet_packed_module_is_dequantized_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    case = BY_NAME["gptq 4 bit, v2"]
    tensors, expected = packed(case, WEIGHT)
    with caplog.at_level(logging.WARNING):
        found = opened(case.config | {"dynamic": {"-:m\\..*": {}}}, tensors)
    assert "excepted from quantization by the config, yet stored quantized: m.q_proj" in caplog.text
    np.testing.assert_array_equal(found.read("m.q_proj.weight"), expected)


def test_gptq_settings_of_single_modules_are_followed() -> None:
    eight, expected = packed(BY_NAME["gptq 8 bit, v2"], WEIGHT, "m.down_proj")
    four, _ = packed(BY_NAME["gptq 4 bit, v2"], WEIGHT)
    config = BY_NAME["gptq 4 bit, v2"].config | {"dynamic": {"+:.*down_proj": {"bits": 8}}}
    found = opened(config, eight | four)
    np.testing.assert_array_equal(found.read("m.down_proj.weight"), expected)


def test_scales_of_activations_and_cache_are_left_out() -> None:
    for name in ("fp8, tensor", "FP8, channel"):
        tensors, _ = packed(BY_NAME[name], WEIGHT)
        extra = {"m.q_proj.input_scale": np.ones(1, np.float32), "m.k_scale": np.ones(1)}
        found = opened(BY_NAME[name].config, tensors | extra)
        assert list(found.tensors) == ["m.q_proj.weight"]


# The method insisted on


def test_the_method_may_be_given_for_old_checkpoints(tmp_path: Path) -> None:
    for name, method, file in [
        ("awq", "awq_marlin", "quant_config.json"),
        ("gptq 4 bit, desc_act", "gptq", "quantize_config.json"),
    ]:
        case = BY_NAME[name]
        folder = tmp_path / method
        folder.mkdir()
        tensors, expected = packed(case, WEIGHT)
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        (folder / file).write_text(json.dumps(case.config | {"quant_method": None}))
        found = open_checkpoint(str(folder), quantization=method)
        np.testing.assert_array_equal(found.read("m.q_proj.weight"), expected)


def test_the_method_given_must_be_the_checkpoints() -> None:
    tensors, _ = packed(BY_NAME["awq"], WEIGHT)
    config = BY_NAME["awq"].config
    assert opened(config, tensors, "awq").quantized
    assert "--quantization gptq, but config.json says awq" in refused(config, tensors, "gptq")
    plain = {"m.q_proj.weight": WEIGHT}
    assert "somewhere holds no fp8 weights" in refused(None, plain, "fp8")
    assert opened(None, plain).tensors["m.q_proj.weight"].dtype == np.float32


def test_the_flag_sets_the_engines_method() -> None:
    for flag in ("-q", "--quantization"):
        assert parse_args(["M", flag, "awq"])[0] == EngineConfig(model="M", quantization="awq")


def test_early_configs_are_recognised() -> None:
    tensors, expected = packed(BY_NAME["nf4"], WEIGHT)
    found = opened({"load_in_4bit": True}, tensors)
    assert found.quantization == "bitsandbytes"
    np.testing.assert_allclose(found.read("m.q_proj.weight"), expected, rtol=1e-6)
    inner: Any = MemoryCheckpoint(None, packed(BY_NAME["W4A16"], WEIGHT)[0])
    inner.config["compression_config"] = BY_NAME["W4A16"].config | {"quant_method": None}
    assert dequantized(inner).config == {"vocab_size": 8}


def test_gptq_zeros_of_nought_borrow_from_their_neighbours() -> None:
    """Version 1 subtracts one from every field of the word at once."""
    zeros = np.array([[0x10203040]], np.uint32)
    tensors = {
        "m.q_proj.qweight": np.full((4, 8), 0x33333333, np.int32),
        "m.q_proj.qzeros": (zeros - np.uint32(0x11111111)).view(np.int32),
        "m.q_proj.scales": np.ones((1, 8), np.float16),
    }
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    found = opened(config, tensors).read("m.q_proj.weight")
    wanted = 3 - np.array([0, 4, 0, 3, 0, 2, 0, 1])
    np.testing.assert_array_equal(found, np.repeat(wanted[:, None], 32, 1))


def test_float8_without_scales_is_not_guessed() -> None:
    plain = {"m.q_proj.weight": WEIGHT.astype(FP8), "m.norm.weight": WEIGHT[0]}
    message = refused({"quant_method": "fp8"}, plain)
    assert "m.q_proj.weight_scale is missing" in message
    assert "norm" not in message
