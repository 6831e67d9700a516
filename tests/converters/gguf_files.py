"""Writes small GGUF files, whole or split, with any metadata."""

import functools
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
from gguf import GGMLQuantizationType
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE

from jaxllm.converters.checkpoint import demo_path
from jaxllm.converters.gguf_checkpoint import open_gguf

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and it doesn't stop.",
    "def add(a, b):\n    return a + b  # 12345\n\n\nprint(add(1, 23))",
    "Être ou ne pas être, voilà la question. ¿Qué tal? Straße, naïve café.",
    "世界你好，这是一个测试。 Привет, мир! ďábel ก็ 👩‍👩‍👧",
    "the the the there they're we've I'll don't THE Then than that this those",
]
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 32, 4, 2, 8, 64, 2

Tensors = Mapping[str, tuple[np.ndarray, GGMLQuantizationType]]


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Tensors, architecture: str = "llama"
) -> Path:
    """Writes a file.

    Args:
        metadata: key to number, bool, text or list; numpy scalars say the width.
        tensors: name to raw data (blocks as u8) and type.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, Sequence):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def model_metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """A tiny model's keys; changes by name without the architecture, None removes one."""
    keys = {
        "context_length": 256,
        "block_count": LAYERS,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": HEAD_DIM,
    }
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    return {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}


def model_tensors(
    *,
    vocab: int = 64,
    tied: bool = True,
    bias: bool = False,
    qk_norm: bool = False,
    seed: int = 0,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> dict[str, tuple[np.ndarray, GGMLQuantizationType]]:
    """A tiny model's random tensors under their GGUF names; matrices quantized as `kind`."""
    random = np.random.default_rng(seed)

    def vector(size: int) -> tuple[np.ndarray, GGMLQuantizationType]:
        return random.normal(size=size).astype(np.float32), GGMLQuantizationType.F32

    def matrix(rows: int, columns: int) -> tuple[np.ndarray, GGMLQuantizationType]:
        values = random.normal(size=(rows, columns)).astype(np.float32)
        return gguf.quants.quantize(values, kind), kind

    tensors = {"token_embd.weight": matrix(vocab, HIDDEN), "output_norm.weight": vector(HIDDEN)}
    if not tied:
        tensors["output.weight"] = matrix(vocab, HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            tensors[f"{block}.{norm}.weight"] = vector(HIDDEN)
        for part, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{block}.attn_{part}.weight"] = matrix(rows * HEAD_DIM, HIDDEN)
            if bias:
                tensors[f"{block}.attn_{part}.bias"] = vector(rows * HEAD_DIM)
        if qk_norm:
            tensors[f"{block}.attn_q_norm.weight"] = vector(HEAD_DIM)
            tensors[f"{block}.attn_k_norm.weight"] = vector(HEAD_DIM)
        tensors[f"{block}.attn_output.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        tensors[f"{block}.ffn_gate.weight"] = matrix(FFN, HIDDEN)
        tensors[f"{block}.ffn_up.weight"] = matrix(FFN, HIDDEN)
        tensors[f"{block}.ffn_down.weight"] = matrix(HIDDEN, FFN)
    return tensors


def split_gguf(folder: Path, metadata: Mapping[str, Any], parts: Sequence[Tensors]) -> list[Path]:
    """Writes a model in parts, as llama.cpp's gguf-split names and marks them."""
    total = sum(len(part) for part in parts)
    paths = []
    for number, part in enumerate(parts):
        marks = {
            "split.no": number,
            "split.count": len(parts),
            "split.tensors.count": total,
        }
        path = folder / f"tiny-{number + 1:05d}-of-{len(parts):05d}.gguf"
        paths.append(write_gguf(path, {**(metadata if number == 0 else {}), **marks}, part))
    return paths


@functools.cache
def bpe_metadata(pre: str | None = "smollm", size: int = 420) -> dict[str, Any]:
    """A byte-level BPE vocabulary trained on CORPUS, with control and user-defined tokens."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|start|>", "<tool_call>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    vocab = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab]
    # The trainer's merges are to be had through its file form only.
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
    }
    return metadata | ({} if pre is None else {"tokenizer.ggml.pre": pre})


@functools.cache
def sentence_piece_model() -> bytes:
    """A SentencePiece BPE model with byte fallback, trained on CORPUS."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.splitlines() if line]),
        model_writer=model,
        model_type="bpe",
        vocab_size=460,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<sep>"],
        minloglevel=2,
    )
    return model.getvalue()


def vocabulary_metadata(kind: str) -> dict[str, Any]:
    """A vocabulary by the name of a BPE splitting rule, or "spm"."""
    return dict(sentence_piece_metadata() if kind == "spm" else bpe_metadata(kind))


@functools.cache
def sentence_piece_metadata() -> dict[str, Any]:
    """The same vocabulary as llama.cpp's converter writes it."""
    model = sentencepiece.SentencePieceProcessor(model_proto=sentence_piece_model())
    ids = range(model.vocab_size())
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
        for i in ids
    ]
    tokens = [model.id_to_piece(i) for i in ids]
    kinds[tokens.index("<sep>")] = 4
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(model.get_score(i)) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }


@functools.cache
def demo_by_transformers() -> dict[str, Any]:
    """What transformers reads from the demo model: its "config", "tensors" and "tokenizer" parts.

    One pass for all tests: it takes the better part of ten seconds.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = demo_path()
    # Only the names of the parameters are taken from the model.
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**open_gguf(path).config))
    return load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
