"""What quantization_config and --quantization say is followed."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from jaxllm.config import EngineConfig
from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.quant_formats import dequantized
from jaxllm.serve.args import FlagParser, add_flags, make_config
from tests.converters.quant_cases import BY_NAME, WEIGHT, MemoryCheckpoint, opened, packed, refused
from tests.converters.quant_packers import FP8

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
        parser = FlagParser()
        add_flags(parser, EngineConfig)
        config = make_config(EngineConfig, parser.parse([flag, "awq"]))
        assert config == EngineConfig(quantization="awq")


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


def test_blocks_larger_than_the_weight_are_one() -> None:
    tensors = {
        "m.q_proj.weight": WEIGHT.astype(FP8),
        "m.q_proj.weight_scale_inv": np.full((1, 1), 2, np.float32),
    }
    config = {"quant_method": "fp8", "weight_block_size": [10**30, 10**12]}
    found = opened(config, tensors).read("m.q_proj.weight")
    np.testing.assert_array_equal(found, WEIGHT.astype(FP8).astype(np.float32) * 2)
