"""A random two-layer Llama folder with a byte-level tokenizer: loads and compiles in seconds."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 32, 4, 2, 64, 2
CONTEXT = 256
BOS, EOS, END_OF_TURN = "<s>", "</s>", "<|end|>"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """One token a byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (BOS, EOS, END_OF_TURN)])
    return tokenizer


def make_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Writes the folder; its weights are large enough that greedy choices have no near ties."""
    tokenizer = make_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    )
    _write(folder / "generation_config.json", {"top_k": 40, "eos_token_id": 257})
    _write(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "intermediate_size": FFN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HIDDEN // HEADS,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "vocab_size": vocab_size,
            "bos_token_id": 256,
            "eos_token_id": 257,
            "dtype": "float32",
        },
    )
    save_file(_weights(vocab_size, seed), folder / "model.safetensors", {"format": "pt"})
    return folder


def _write(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content))


def _weights(vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, 2.0 / np.sqrt(columns), (rows, columns)).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    kv = HIDDEN // HEADS * KV_HEADS
    weights = {
        "model.embed_tokens.weight": matrix(vocab_size, HIDDEN),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(vocab_size, HIDDEN),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        weights |= {
            layer + "input_layernorm.weight": ones,
            layer + "post_attention_layernorm.weight": ones,
            layer + "self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN),
            layer + "self_attn.k_proj.weight": matrix(kv, HIDDEN),
            layer + "self_attn.v_proj.weight": matrix(kv, HIDDEN),
            layer + "self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
            layer + "mlp.gate_proj.weight": matrix(FFN, HIDDEN),
            layer + "mlp.up_proj.weight": matrix(FFN, HIDDEN),
            layer + "mlp.down_proj.weight": matrix(HIDDEN, FFN),
        }
    return weights
