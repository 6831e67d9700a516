"""GGUF checkpoints: names, order of rows, slices, split files."""

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.converters.checkpoint import demo_path
from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.gguf_checkpoint import GgufCheckpoint, open_gguf
from tests.converters.gguf_files import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    demo_by_transformers,
    model_metadata,
    model_tensors,
    split_gguf,
    write_gguf,
)


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of Llama models."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def demo() -> GgufCheckpoint:
    return open_gguf(demo_path())


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> GgufCheckpoint:
    path = tmp_path_factory.mktemp("gguf") / "q.gguf"
    return open_gguf(
        write_gguf(path, model_metadata(), model_tensors(kind=GGMLQuantizationType.Q8_0))
    )


@pytest.mark.filterwarnings("ignore")
def test_demo_tensors_equal_transformers(demo: GgufCheckpoint) -> None:
    tensors = demo_by_transformers()["tensors"]
    assert set(tensors) == set(demo.tensors)
    for name, tensor in tensors.items():
        assert demo.tensors[name].shape == tuple(tensor.shape)
        np.testing.assert_array_equal(demo.read(name), tensor.numpy(), err_msg=name)


def test_demo_types_are_counted(demo: GgufCheckpoint) -> None:
    assert demo.type_histogram == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert demo.source == "gguf"
    info = demo.tensors["model.layers.0.mlp.up_proj.weight"]
    assert info.dtype == np.float32
    assert info.nbytes == 1536 * 576 // 32 * 20


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_rows_of_llama_only_are_put_in_order(architecture: str, tmp_path: Path) -> None:
    tensors = model_tensors(bias=True)
    path = write_gguf(tmp_path / "m.gguf", model_metadata(architecture), tensors, architecture)
    checkpoint = open_gguf(path)
    for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        for kind in ("weight", "bias"):
            read = checkpoint.read(f"model.layers.1.self_attn.{part}_proj.{kind}")
            if architecture == "llama" and part != "v":
                read = interleave(read, heads)
            np.testing.assert_array_equal(read, tensors[f"blk.1.attn_{part}.{kind}"][0])


def test_names_are_hugging_faces(tmp_path: Path) -> None:
    tensors = model_tensors(tied=False, qk_norm=True, bias=True)
    tensors["blk.0.attn_output.bias"] = tensors["output_norm.weight"]
    tensors["blk.1.something.weight"] = tensors["output_norm.weight"]
    tensors["rope_freqs.weight"] = (np.ones(HEAD_DIM // 2, np.float32), GGMLQuantizationType.F32)
    path = write_gguf(tmp_path / "m.gguf", model_metadata("qwen3"), tensors, "qwen3")
    names = set(open_gguf(path).tensors)
    layer = {
        "input_layernorm.weight", "post_attention_layernorm.weight",
        "self_attn.q_norm.weight", "self_attn.k_norm.weight", "self_attn.o_proj.weight",
        "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
        *(f"self_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")),
    }  # fmt: skip
    wanted = {f"model.layers.{i}.{name}" for i in range(LAYERS) for name in layer}
    wanted |= {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    wanted |= {"model.layers.0.self_attn.o_proj.bias", "blk.1.something.weight"}
    assert names == wanted


def slices(size: int) -> st.SearchStrategy[slice]:
    bound = st.none() | st.integers(-size - 2, size + 2)
    return st.builds(slice, bound, bound, st.sampled_from([None, 1, 2, 5]))


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_part_equals_the_part_of_the_whole(data: st.DataObject, demo: GgufCheckpoint) -> None:
    layer = "model.layers.7."
    name = data.draw(
        st.sampled_from(
            ["self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"]
        )
    )
    whole = demo.read(layer + name)
    count = data.draw(st.integers(0, whole.ndim))
    index = tuple(data.draw(slices(size)) for size in whole.shape[:count])
    np.testing.assert_array_equal(demo.read(layer + name, index), whole[index])


def test_floats_are_not_widened(tmp_path: Path) -> None:
    for kind, dtype in (("F16", "float16"), ("BF16", "bfloat16"), ("F32", "float32")):
        tensors = model_tensors(kind=GGMLQuantizationType[kind])
        checkpoint = open_gguf(write_gguf(tmp_path / f"{kind}.gguf", model_metadata(), tensors))
        name = "model.layers.0.mlp.up_proj.weight"
        assert checkpoint.tensors[name].dtype == checkpoint.read(name).dtype == dtype


def test_absent_tensor_is_a_key_error(quantized: GgufCheckpoint) -> None:
    with pytest.raises(KeyError, match="no_such"):
        quantized.read("no_such")


class TestSplit:
    """A model in three parts, the first with metadata only, the head in the third."""

    @pytest.fixture
    def parts(self, tmp_path: Path) -> list[Path]:
        tensors = model_tensors(tied=False)
        head = {"output.weight": tensors.pop("output.weight")}
        return split_gguf(tmp_path, model_metadata(), [{}, tensors, head])

    def test_any_part_and_the_folder_give_the_whole(self, parts: list[Path]) -> None:
        tensors = model_tensors(tied=False)
        for entry in (*parts, parts[0].parent):
            checkpoint = open_gguf(entry)
            assert checkpoint.config["tie_word_embeddings"] is False
            assert len(checkpoint.tensors) == len(tensors)
            for name, key in (
                ("lm_head.weight", "output.weight"),
                ("model.embed_tokens.weight", "token_embd.weight"),
            ):
                np.testing.assert_array_equal(checkpoint.read(name), tensors[key][0])

    def test_missing_part_is_named(self, parts: list[Path]) -> None:
        parts[2].unlink()
        with pytest.raises(CheckpointError, match=r"missing beside it: tiny-00003-of-00003\.gguf"):
            open_gguf(parts[0])
        with pytest.raises(CheckpointError, match=r"tiny-00003-of-00003\.gguf"):
            open_gguf(parts[0].parent)

    @pytest.mark.parametrize(
        ("key", "old", "new"),
        [("split.count", 3, 4), ("split.no", 2, 1), ("split.tensors.count", 21, 22)],
    )
    def test_disagreeing_part_is_named(
        self, key: str, old: int, new: int, parts: list[Path]
    ) -> None:
        bad = parts[0] if key == "split.tensors.count" else parts[2]
        content = bad.read_bytes()
        field = key.encode() + struct.pack("<I", 4)
        assert field + struct.pack("<I", old) in content
        bad.write_bytes(
            content.replace(field + struct.pack("<I", old), field + struct.pack("<I", new))
        )
        with pytest.raises(CheckpointError) as error:
            open_gguf(parts[1])
        assert key in str(error.value)
        assert bad.name in str(error.value)

    def test_tensor_in_two_parts(self, tmp_path: Path) -> None:
        tensors = model_tensors()
        split_gguf(tmp_path, model_metadata(), [tensors, tensors])
        with pytest.raises(CheckpointError, match=r"is in two parts: .*00001.* and .*00002"):
            open_gguf(tmp_path)

    def test_part_alone_under_another_name(self, parts: list[Path], tmp_path: Path) -> None:
        alone = tmp_path / "alone.gguf"
        shutil.copy(parts[0], alone)
        with pytest.raises(CheckpointError, match=r"one of 3 parts \(split.count\)"):
            open_gguf(alone)


def test_folder_with_several_models(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_gguf(tmp_path / f"{name}.gguf", model_metadata(), model_tensors())
    with pytest.raises(CheckpointError, match=r"several GGUF models.*a\.gguf, b\.gguf"):
        open_gguf(tmp_path)


def test_folder_without_any(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \.gguf file"):
        open_gguf(tmp_path)
