"""Tiny random HF models beside ours: the same weights, and our prefill and decode path."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from jax.sharding import AxisType

from jaxllm.models.base import ModelConfig
from jaxllm.models.batch import AttentionMetadata, ForwardBatch, KVCache
from jaxllm.models.causal_lm import CausalLM
from jaxllm.models.registry import resolve

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
BLOCK_SIZE = 8


def make_torch_model(architecture: str, seed: int = 0, **changes: Any) -> Any:
    """A random HF model in float32; biases and norm weights are random too."""
    name = architecture.removesuffix("ForCausalLM")
    # transformers moves settings about inside the dicts that it is given.
    settings = {k: dict(v) if isinstance(v, dict) else v for k, v in (TINY | changes).items()}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**settings)
    config.architectures = [architecture]
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key:
                value.copy_(1 + 0.2 * torch.randn_like(value))
            elif key.endswith("bias"):
                value.copy_(0.2 * torch.randn_like(value))
    return model


def make_params(weights: dict[str, np.ndarray], config: ModelConfig, dtype: Any) -> dict[str, Any]:
    """Our flat parameters by dotted name, from an HF state dict."""
    kv_heads, head_dim = config.num_key_value_heads, config.head_dim
    group = config.num_attention_heads // kv_heads
    flat = {}

    def heads(prefix: str, suffix: str) -> np.ndarray:
        q, k, v = (weights[f"{prefix}.{name}_proj.{suffix}"].T for name in "qkv")
        q = q.reshape(*q.shape[:-1], kv_heads, group, head_dim)
        k, v = (x.reshape(*x.shape[:-1], kv_heads, 1, head_dim) for x in (k, v))
        return np.concatenate([q, k, v], axis=-2)

    for name, value in weights.items():
        prefix, _, suffix = name.rpartition(".")
        parent, _, module = prefix.rpartition(".")
        if module == "q_proj":
            flat[f"{parent}.qkv_proj.{suffix}"] = heads(parent, suffix)
        elif module == "gate_proj":
            pair = [value.T, weights[f"{parent}.up_proj.{suffix}"].T]
            flat[f"{parent}.gate_up_proj.{suffix}"] = np.stack(pair, axis=-2)
        elif module == "o_proj" and suffix == "weight":
            flat[name] = value.T.reshape(kv_heads, group, head_dim, -1)
        elif module == "down_proj":
            flat[name] = value.T
        elif module not in ("k_proj", "v_proj", "up_proj") and not (
            name == "lm_head.weight" and config.tie_word_embeddings
        ):
            flat[name] = value
    return {name: jnp.asarray(value, dtype) for name, value in flat.items()}


class Tiny:
    """Our model with the weights of an HF one, and its paged cache."""

    def __init__(self, torch_model: Any, dtype: Any = jnp.float32, **config_changes: Any) -> None:
        config_json = torch_model.config.to_dict() | config_changes
        model_class = resolve(config_json["architectures"])
        self.config = model_class.Config.from_hf(config_json)
        self.dtype = dtype = jnp.dtype(dtype)
        weights = {k: v.detach().numpy() for k, v in torch_model.state_dict().items()}
        self.params = make_params(weights, self.config, dtype)
        graphdef, abstract = abstract_model(model_class, self.config, dtype)
        shapes = {name: leaf.shape for name, leaf in abstract.items()}
        assert shapes == {name: leaf.shape for name, leaf in self.params.items()}
        # Compiling is most of these tests' time; the numbers do not depend on the code's speed.
        self.forward = jax.jit(
            functools.partial(_forward, graphdef),
            compiler_options={"xla_backend_optimization_level": 0},
        )

    def new_cache(self, num_blocks: int) -> KVCache:
        shape = (
            num_blocks * BLOCK_SIZE,
            2,
            self.config.num_key_value_heads,
            self.config.head_dim,
        )
        return [jnp.zeros(shape, self.dtype) for _ in range(self.config.num_hidden_layers)]

    def logits(self, prompts: Sequence[Sequence[int]], chunks: Sequence[int]) -> list[np.ndarray]:
        """Logits of every token of every prompt, [len, V] each.

        The prompts advance together, `chunks` tokens of each a step (then the last number over
        and over), through a shuffled block table; steps are padded to a few sizes.
        """
        width = -(-max(map(len, prompts)) // BLOCK_SIZE) + 1
        blocks = np.random.default_rng(1).permutation(len(prompts) * width + 1)
        tables = blocks[: len(prompts) * width].reshape(len(prompts), width).astype(np.int32)
        cache = self.new_cache(len(blocks))
        done, out = [0] * len(prompts), [[] for _ in prompts]
        sizes = iter(chunks)
        size = next(sizes)
        while any(len(p) > n for p, n in zip(prompts, done, strict=True)):
            lens = [min(size, len(p) - n) for p, n in zip(prompts, done, strict=True)]
            batch = make_batch(prompts, done, lens, tables, len(blocks))
            logits, cache = self.forward(self.params, batch, cache)
            start = np.asarray(batch.attention.query_start)
            for row, request in enumerate(r for r, n in enumerate(lens) if n):
                out[request].append(np.asarray(logits[start[row] : start[row + 1]]))
                done[request] += lens[request]
            size = next(sizes, size)
        return [np.concatenate(parts) for parts in out]


def make_batch(
    prompts: Sequence[Sequence[int]],
    done: Sequence[int],
    lens: Sequence[int],
    tables: np.ndarray,
    num_blocks: int,
) -> ForwardBatch:
    """A step of lens[r] more tokens of each request, padded in tokens and requests."""
    requests = [r for r, n in enumerate(lens) if n]
    decode_only = all(lens[r] == 1 for r in requests)
    real = sum(lens)
    rows = len(prompts) + 1  # the same in every step, so that few steps compile
    tokens = rows if decode_only else -(-(real + 1) // 64) * 64
    ids, positions = np.zeros(tokens, np.int32), np.zeros(tokens, np.int32)
    slots = num_blocks * BLOCK_SIZE + np.arange(tokens, dtype=np.int32)
    query_start = np.full(rows + 1, real, np.int32)
    seq_lens, block_tables = np.zeros(rows, np.int32), np.zeros((rows, tables.shape[1]), np.int32)
    query_start[0] = at = 0
    for row, request in enumerate(requests):
        span = np.arange(done[request], done[request] + lens[request])
        part = slice(at, at + lens[request])
        ids[part] = np.asarray(prompts[request])[span]
        positions[part] = span
        slots[part] = tables[request, span // BLOCK_SIZE] * BLOCK_SIZE + span % BLOCK_SIZE
        at = query_start[row + 1] = part.stop
        seq_lens[row], block_tables[row] = span[-1] + 1, tables[request]
    metadata = AttentionMetadata(
        query_start=jnp.asarray(query_start),
        seq_lens=jnp.asarray(seq_lens),
        block_tables=jnp.asarray(block_tables),
        slot_mapping=jnp.asarray(slots),
        block_size=BLOCK_SIZE,
        decode_only=decode_only,
    )
    return ForwardBatch(jnp.asarray(ids), jnp.asarray(positions), metadata)


def abstract_model(
    model_class: Callable[..., CausalLM], config: ModelConfig, dtype: Any, tp: int = 1
) -> tuple[Any, dict[str, Any]]:
    """The graph definition and the flat abstract parameters."""
    mesh = make_mesh(tp)
    with jax.set_mesh(mesh):
        graphdef, state = nnx.split(nnx.eval_shape(lambda: model_class(config, jnp.dtype(dtype))))
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state))
    return graphdef, {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def make_mesh(tp: int) -> jax.sharding.Mesh:
    return jax.make_mesh((1, tp), ("pp", "tp"), axis_types=(AxisType.Auto,) * 2)


def nested(flat: dict[str, Any]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for name, leaf in flat.items():
        *parents, last = (int(key) if key.isdigit() else key for key in name.split("."))
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def _forward(
    graphdef: Any, params: dict[str, jax.Array], batch: ForwardBatch, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    model = nnx.merge(graphdef, nested(params))
    hidden, cache = model(batch, cache)
    return model.compute_logits(hidden), cache


def torch_logits(model: Any, prompt: Sequence[int]) -> np.ndarray:
    """HF's logits of every token, [len, V], from one uncached pass."""
    with torch.no_grad():
        return model(torch.tensor([list(prompt)]), use_cache=False).logits[0].float().numpy()


def make_prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, TINY["vocab_size"], n).tolist() for n in lengths]


def assert_equal_to_torch(
    torch_model: Any,
    prompts: Sequence[Sequence[int]],
    chunks: Sequence[int] = (13, 20, 1),
    **config_changes: Any,
) -> None:
    """Prefill in chunks and decode give HF's logits within 1e-4."""
    ours = Tiny(torch_model, **config_changes).logits(prompts, chunks)
    for prompt, logits in zip(prompts, ours, strict=True):
        np.testing.assert_allclose(logits, torch_logits(torch_model, prompt), atol=1e-4, rtol=0)
