import dataclasses
import logging
from typing import Any

import pytest

from jaxllm.models.registry import resolve, supported_architectures
from tests.models.harness import TINY, make_torch_model

ARCHITECTURES = supported_architectures()


def _config(architecture: str = "LlamaForCausalLM", **changes: Any) -> Any:
    return resolve([architecture]).Config.from_hf(TINY | changes)


def test_registry_returns_the_class_of_the_name() -> None:
    for name in ARCHITECTURES:
        assert resolve([name]).__name__ == name
    assert resolve(["Unheard", "Qwen2ForCausalLM"]).__name__ == "Qwen2ForCausalLM"


def test_unknown_architecture_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"LLaMAForCausalLM is not supported.*LlamaForCausalLM"):
        resolve(["LLaMAForCausalLM"])
    with pytest.raises(ValueError, match="names no architecture; supported are Llama"):
        resolve([])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_transformers_writes_is_read(architecture: str) -> None:
    saved = make_torch_model(architecture, head_dim=16).config.to_dict()
    config = resolve([architecture]).Config.from_hf(saved)
    for key in TINY.keys() - {"initializer_range"}:
        assert getattr(config, key) == saved[key]
    assert config.head_dim == 16
    assert config.context_length == 256


def test_null_counts_as_absent() -> None:
    nulls = dict.fromkeys(
        ("head_dim", "num_key_value_heads", "rope_scaling", "sliding_window", "pad_token_id")
    )
    config = _config(**nulls)
    assert (config.head_dim, config.num_key_value_heads) == (8, 4)
    assert config.window(0) is None


def test_qwen3_has_its_own_default_head_dim() -> None:
    assert _config("Qwen3ForCausalLM").head_dim == 128


def test_missing_fields_are_all_listed() -> None:
    with pytest.raises(ValueError, match=r"lacks hidden_size, rms_norm_eps for LlamaForCausalLM"):
        _config(hidden_size=None, rms_norm_eps=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        ({"sliding_window": 8}, "sliding_window = 8 is not supported"),
        ({"rope_interleaved": True}, "rope_interleaved = True is not supported"),
        ({"layer_types": ["sliding_attention"]}, "layer_types = .* is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config = .*awq"),
        ({"hidden_act": "xielu"}, "hidden_act = 'xielu' is not one of silu"),
        ({"hidden_size": "32"}, "hidden_size = '32' must be of type int"),
        ({"hidden_size": 32.5}, "hidden_size = 32.5 must be of type int"),
        ({"hidden_size": True}, "hidden_size = True must be of type int"),
        ({"mlp_bias": 1}, "mlp_bias = 1 must be of type bool"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan must be from 0 to 1"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps = -1e-06 must be from 0 to 1"),
        ({"vocab_size": 0}, "vocab_size = 0 must be at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 must be at least 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 must divide num_attention_heads = 4"),
        ({"head_dim": 7}, "head_dim = 7 must be even"),
        ({"max_position_embeddings": "256"}, "max_position_embeddings = '256' must be of type int"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _config(**changes)


def test_unknown_numbers_are_all_listed() -> None:
    message = "foo_scale = 2.0, bar_ratio = 3 are not supported by LlamaForCausalLM"
    with pytest.raises(ValueError, match=message):
        _config(foo_scale=2.0, some_note="text", bar_ratio=3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_null_is_the_same_as_no_key(architecture: str) -> None:
    """For every key that is not required, of the config itself and of the rotary settings."""
    bare = _config(architecture)
    optional = {f.name for f in dataclasses.fields(bare) if f.default is not dataclasses.MISSING}
    optional |= {"num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters", "rope_theta"}
    optional |= {"pad_token_id", "sliding_window", "dtype", "torch_dtype", "quantization_config"}
    absent = {key: value for key, value in TINY.items() if key not in optional}
    config = resolve([architecture]).Config
    assert config.from_hf(absent | dict.fromkeys(optional)) == config.from_hf(absent)


def test_harmless_keys_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _config(
            architectures=["LlamaForCausalLM"],
            dtype="bfloat16",
            use_cache=True,
            pretraining_tp=2,
            bos_token_id=1,
            eos_token_id=[1, 2],
            attention_dropout=0.1,
            use_mrope=False,
            layer_types=["full_attention"] * 2,
            _name_or_path="x",
        )
        assert not caplog.records
        _config(some_note="text", scale_attn_weights=False)
    assert "some_note = 'text' is not known and ignored" in caplog.text
    assert "scale_attn_weights = False is not known and ignored" in caplog.text


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
class TestWindows:
    def test_the_flag_turns_windows_off(self, architecture: str) -> None:
        config = _config(architecture, sliding_window=8, max_window_layers=0)
        assert [config.window(i) for i in range(2)] == [None, None]

    def test_layers_from_max_window_layers_on_slide(self, architecture: str) -> None:
        config = _config(
            architecture, use_sliding_window=True, sliding_window=8, max_window_layers=1
        )
        assert [config.window(i) for i in range(2)] == [None, 8]

    def test_an_explicit_list_wins(self, architecture: str) -> None:
        config = _config(
            architecture,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=2,
            layer_types=["sliding_attention", "full_attention"],
        )
        assert [config.window(i) for i in range(2)] == [8, None]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"layer_types": ["full_attention"]}, "has 1 entries for num_hidden_layers = 2"),
            ({"layer_types": ["full_attention", "x"]}, "'x' is not full_attention or sliding"),
            ({"layer_types": ["sliding_attention"] * 2}, "needs a window, but use_sliding_window"),
            ({"layer_types": "full_attention"}, "must be a list of texts"),
            ({"sliding_window": 0}, "sliding_window = 0 must be at least 1"),
        ],
    )
    def test_bad_schedules_are_refused(
        self, architecture: str, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            _config(architecture, **changes)
