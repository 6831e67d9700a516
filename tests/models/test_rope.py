"""Rotary scalings against transformers: frequencies exactly, logits of whole models."""

import logging
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from jaxllm.models.layers.rope import attention_factor, inverse_frequencies, rotation
from jaxllm.models.rope_config import RopeConfig
from tests.models.harness import (
    TINY,
    Tiny,
    assert_equal_to_torch,
    make_prompts,
    make_torch_model,
    torch_logits,
)

LLAMA = "LlamaForCausalLM"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": LLAMA3,
    "llama3_all_scaled": LLAMA3 | {"original_max_position_embeddings": 4},
    "yarn": YARN,
    "yarn_mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3},
    "yarn_attention_factor": YARN | {"attention_factor": 1.3},
    "yarn_betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn_no_ramp": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
}
SHAPES = [(64, 10000.0), (128, 500000.0), (96, 1e6)]


def _torch_rotary(head_dim: int, theta: float, scaling: dict[str, Any]) -> LlamaRotaryEmbedding:
    settings = TINY | {
        "head_dim": head_dim,
        "rope_theta": theta,
        "rope_scaling": dict(scaling),
    }
    return LlamaRotaryEmbedding(LlamaConfig(**settings))


def _ours(theta: float, scaling: dict[str, Any] | None, **more: Any) -> RopeConfig:
    return RopeConfig.from_hf(TINY | {"rope_theta": theta, "rope_scaling": scaling} | more)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("head_dim", "theta"), SHAPES)
def test_frequencies_equal_transformers(name: str, head_dim: int, theta: float) -> None:
    rotary = _torch_rotary(head_dim, theta, SCALINGS[name])
    config = _ours(theta, SCALINGS[name])
    ours = inverse_frequencies(config, head_dim)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, np.asarray(rotary.inv_freq), rtol=5e-7)
    assert attention_factor(config) == pytest.approx(rotary.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("name", SCALINGS)
def test_rotation_equals_transformers(name: str) -> None:
    positions = np.arange(0, 200, 7)
    rotary = _torch_rotary(64, 10000.0, SCALINGS[name])
    cos, sin = rotary(torch.zeros(1), torch.tensor(positions)[None])
    seq_lens = jnp.full(len(positions), positions[-1] + 1)
    rope = rotation(_ours(10000.0, SCALINGS[name]), 64, jnp.asarray(positions), seq_lens)
    np.testing.assert_allclose(rope.cos, cos[0, :, :32], atol=3e-5)
    np.testing.assert_allclose(rope.sin, sin[0, :, :32], atol=3e-5)


def test_dynamic_scaling_follows_each_requests_own_length() -> None:
    scaling = SCALINGS["dynamic"]
    positions, lengths = [10, 10, 299, 999], [11, 300, 300, 1000]
    rope = rotation(_ours(10000.0, scaling), 64, jnp.asarray(positions), jnp.asarray(lengths))
    for row, (position, length) in enumerate(zip(positions, lengths, strict=True)):
        rotary = _torch_rotary(64, 10000.0, scaling)  # anew: it remembers the longest it saw
        cos, _ = rotary(torch.zeros(1), torch.tensor([[position, length - 1]]))
        np.testing.assert_allclose(rope.cos[row], cos[0, 0, :32], atol=2e-4)


@pytest.mark.parametrize("name", ["linear", "dynamic", "llama3", "yarn_mscale"])
def test_logits_equal_transformers(name: str) -> None:
    model = make_torch_model(LLAMA, rope_scaling=SCALINGS[name], num_hidden_layers=1)
    assert_equal_to_torch(model, make_prompts(150, 9), chunks=(60, 70, 1))


def test_dynamic_logits_beyond_the_limit_equal_transformers() -> None:
    """A prompt in one pass, past max_position_embeddings: the base has grown."""
    changes = {"max_position_embeddings": 32, "num_hidden_layers": 1}
    scaled = make_torch_model(LLAMA, rope_scaling=SCALINGS["dynamic"], **changes)
    prompt = make_prompts(100)[0]
    plain = torch_logits(make_torch_model(LLAMA, **changes), prompt)
    assert np.abs(torch_logits(scaled, prompt) - plain).max() > 0.01
    assert_equal_to_torch(scaled, [prompt], chunks=(100,))


class TestSpelling:
    """RoPE scaling spelled `type`, `rope_type`, both, or neither."""

    prompt = make_prompts(130)[0]

    @pytest.mark.parametrize("key", ["type", "rope_type"])
    @pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
    def test_either_key_in_either_place_scales(self, key: str, where: str) -> None:
        scaling = {"rope_type": "linear", "factor": 2.0}
        model = make_torch_model(LLAMA, rope_scaling=scaling, num_hidden_layers=1)
        spelled = {"rope_parameters": None, "rope_theta": 10000.0}
        spelled[where] = {key: "linear", "factor": 2.0}
        assert_equal_to_torch(model, [self.prompt], chunks=(130,), **spelled)
        plain = Tiny(model, rope_parameters=None).logits([self.prompt], (130,))[0]
        assert np.abs(plain[100:] - torch_logits(model, self.prompt)[100:]).max() > 0.01

    def test_rope_type_wins_over_type_with_a_warning(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = make_torch_model(LLAMA, rope_scaling=LLAMA3, num_hidden_layers=1)
        both = LLAMA3 | {"type": "linear"}
        with caplog.at_level(logging.WARNING):
            assert_equal_to_torch(model, [self.prompt], chunks=(130,), rope_parameters=both)
        assert "'llama3' wins over type 'linear'" in caplog.text

    def test_scaling_without_a_type_is_refused(self) -> None:
        with pytest.raises(ValueError, match="sets factor but neither 'rope_type' nor 'type'"):
            _ours(10000.0, {"factor": 8})


def test_theta_inside_the_dict_wins() -> None:
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    assert _ours(10000.0, None, **newer).rope_theta == 7.0
    assert RopeConfig.from_hf(TINY | newer).rope_theta == 7.0
    assert RopeConfig.from_hf(TINY).rope_theta == 10000.0


def test_original_length_outside_the_dict_wins() -> None:
    config = _ours(10000.0, YARN, original_max_position_embeddings=32)
    assert config.original_max_position_embeddings == 32


def test_yarn_without_factor_derives_it() -> None:
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}
    assert _ours(10000.0, scaling).factor == 4.0


@pytest.mark.parametrize(
    ("scaling", "context"),
    [(None, 256), ({"type": "linear", "factor": 4}, 1024), (YARN, 256), (LLAMA3, 256)],
)
def test_context_length(scaling: dict[str, Any] | None, context: int) -> None:
    assert _ours(10000.0, scaling).context_length == context


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "longrope", "factor": 2}, "rope_scaling.rope_type = 'longrope'"),
        ({"type": "linear"}, "of type 'linear' needs 'factor'"),
        ({"type": "linear", "factor": "2"}, "rope_scaling.factor = '2' must be a number"),
        ({"type": "linear", "factor": True}, "rope_scaling.factor = True must be a number"),
        ({"type": "linear", "factor": -1}, "rope_scaling.factor = -1 must be a number above 0"),
        ({"type": "linear", "factor": 2, "warp": 3}, "rope_scaling.warp = 3 is not known"),
        ({"rope_type": "llama3", "factor": 8}, "needs 'low_freq_factor'"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor = 1.0 must exceed"),
        ({"full_attention": {"rope_type": "default"}}, "settings by layer type"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ([2], "must be an object"),
    ],
)
def test_what_is_not_supported_is_named(scaling: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        _ours(10000.0, scaling)


def test_a_setting_of_another_scaling_is_only_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        _ours(10000.0, {"type": "linear", "factor": 2, "beta_fast": 32})
    assert "beta_fast is not used by 'linear'" in caplog.text
