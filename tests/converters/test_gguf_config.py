"""config.json out of GGUF metadata."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from jaxllm.converters.checkpoint import demo_path
from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.gguf_checkpoint import open_gguf
from jaxllm.converters.gguf_rope import llama3_factors
from tests.converters.gguf_files import (
    HEAD_DIM,
    demo_by_transformers,
    model_metadata,
    model_tensors,
    write_gguf,
)


def config_of(
    folder: Path, architecture: str = "llama", tensors: Any = None, **changes: Any
) -> dict[str, Any]:
    path = folder / "m.gguf"
    write_gguf(
        path,
        model_metadata(architecture, **changes),
        model_tensors() if tensors is None else tensors,
        architecture,
    )
    return open_gguf(path).config


def factors(values: np.ndarray) -> dict[str, Any]:
    return model_tensors() | {
        "rope_freqs.weight": (values.astype(np.float32), GGMLQuantizationType.F32)
    }


@pytest.mark.filterwarnings("ignore")
def test_demo_equals_transformers() -> None:
    wanted = demo_by_transformers()["config"]
    checkpoint = open_gguf(demo_path())
    config = checkpoint.config
    renamed = {"_model_name_or_path", "unk_token_id"}
    assert {k: config.get(k) for k in wanted if k not in renamed} == {
        k: v for k, v in wanted.items() if k not in renamed
    }
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_scaling"] is None
    assert not config["attention_bias"]
    assert not config["mlp_bias"]
    assert checkpoint.generation_config == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_transformers_takes_it(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = config_of(tmp_path, architecture, rope__freq_base=500000.0)
    made = AutoConfig.for_model(**config)
    assert made.architectures is not None
    assert made.architectures[0].lower() == f"{architecture}forcausallm"
    assert made.rope_parameters is not None
    assert made.rope_parameters["rope_theta"] == 500000.0
    assert made.hidden_size == 32
    assert made.vocab_size == 64
    assert getattr(made, "head_dim", HEAD_DIM) == HEAD_DIM


def test_head_size_apart_from_hidden_size(tmp_path: Path) -> None:
    changes = {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16}
    for architecture in ("llama", "qwen2", "qwen3"):
        assert config_of(tmp_path, architecture, **changes)["head_dim"] == 16


def test_vocabulary_is_the_embeddings_whatever_the_key_says(tmp_path: Path) -> None:
    assert config_of(tmp_path, vocab_size=999)["vocab_size"] == 64


def test_ties_and_biases_are_seen_in_the_tensors(tmp_path: Path) -> None:
    config = config_of(tmp_path, tensors=model_tensors(tied=False, bias=True))
    assert config["tie_word_embeddings"] is False
    assert config["attention_bias"] is True
    assert config["mlp_bias"] is False
    assert "attention_bias" not in config_of(tmp_path, "qwen2", model_tensors(bias=True))


def test_every_end_token_ends_a_text(tmp_path: Path) -> None:
    ends = {"eos_token_id": 7, "eot_token_id": 9, "eom_token_id": 7}
    metadata = model_metadata() | {f"tokenizer.ggml.{key}": value for key, value in ends.items()}
    path = write_gguf(tmp_path / "m.gguf", metadata, model_tensors())
    assert open_gguf(path).generation_config == {"eos_token_id": [7, 9]}


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, None),
        ({"type": "none"}, None),
        ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            {"type": "yarn", "factor": 4.0, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
    ],
)
def test_named_rope_scaling(keys: dict[str, Any], wanted: Any, tmp_path: Path) -> None:
    changes = {f"rope.scaling.{key}": value for key, value in keys.items()}
    assert config_of(tmp_path, **changes)["rope_scaling"] == wanted


def test_old_name_of_linear_scaling(tmp_path: Path) -> None:
    config = config_of(tmp_path, rope__scale_linear=4.0)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    "parameters",
    [
        (8.0, 1.0, 4.0, 8192),
        (32.0, 1.0, 4.0, 8192),
        (4.0, 1.5, 6.0, 2048),
        (4.0, 1.0, 4.0, 256),
        (2.0, 1.0, 4.0, 40),
    ],
)
def test_llama3_scaling_comes_back_from_its_factors(
    parameters: tuple[float, float, float, int], tmp_path: Path
) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values = llama3_factors(HEAD_DIM, 10000.0, *parameters)
    config = config_of(tmp_path, tensors=factors(values))
    assert config["rope_scaling"]["rope_type"] == "llama3"
    inv_freq, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), "cpu")
    plain = 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    np.testing.assert_allclose(inv_freq.numpy(), plain / values, rtol=1e-5)


def test_factors_of_one_are_no_scaling(tmp_path: Path) -> None:
    assert config_of(tmp_path, tensors=factors(np.ones(HEAD_DIM // 2)))["rope_scaling"] is None


@pytest.mark.parametrize(
    ("changes", "tensors", "said"),
    [
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, None, "longrope"),
        ({"rope.scaling.type": "linear"}, None, "rope.scaling.factor is None"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": -1.0}, None, "-1.0"),
        ({}, factors(np.array([3.0, 1.0, 2.0, 1.0])), "rope_freqs.weight"),
        ({}, factors(np.ones(3) * 2), "shape"),
        ({"expert_count": 8}, None, "mixture of experts"),
        ({"attention.sliding_window": 8}, None, "sliding attention window"),
        ({"rope.dimension_count": 4}, None, "rotation of a part of each head"),
        ({"attention.value_length": 4}, None, "another length than keys"),
        ({"block_count": None}, None, "llama.block_count is missing"),
        ({"block_count": 0}, None, "llama.block_count is 0"),
        ({"context_length": "many"}, None, "llama.context_length is 'many'"),
        ({"attention.head_count": 5}, None, "divisor"),
        ({"attention.head_count_kv": [2, 1]}, None, "[2, 1]"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, None, "epsilon"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    changes: dict[str, Any], tensors: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as error:
        config_of(tmp_path, tensors=tensors, **changes)
    assert said in str(error.value)
    assert "m.gguf" in str(error.value)


def test_unsupported_architecture_lists_the_supported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'mamba'.*llama, qwen2, qwen3"):
        config_of(tmp_path, "mamba")


def test_unread_keys_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config_of(tmp_path, attention__magic=2)
    assert "llama.attention.magic" in caplog.text
