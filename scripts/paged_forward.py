"""All logits and hidden states of one sequence, through the engine's own model and paged cache."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.models.batch import AttentionMetadata, ForwardBatch
from jaxllm.runner import kv_cache
from jaxllm.runner.model_runner import ModelRunner


def _logits(params: Any, batch: ForwardBatch, cache: Any, *, merge: Any) -> Any:
    model = merge(params)
    hidden, cache = model(batch, cache)
    return model.compute_logits(hidden), cache


def _states(params: Any, batch: ForwardBatch, cache: list[Any], *, merge: Any) -> list[Any]:
    model = merge(params)
    x = model.embed(batch)
    states, rope = [x], model.rotary(batch)
    for layer, kv in zip(model.layers, cache, strict=True):
        x, _ = layer(x, rope, kv, batch.attention)
        states.append(x)
    return [*states, model.norm(x)]


class PagedForward:
    """Feeds one sequence at a time, in chunks or token by token, over shuffled blocks."""

    def __init__(self, runner: ModelRunner, config: EngineConfig) -> None:
        assert config.max_num_batched_tokens
        assert config.max_model_len
        self._runner, self._config = runner, config
        self._chunk = config.max_num_batched_tokens
        self.max_tokens = min(config.max_model_len, 4096)
        blocks = -(-self.max_tokens // config.block_size)
        table = np.random.default_rng(0).permutation(blocks)
        self._table = table.astype(np.int32)
        mesh = jax.tree.leaves(runner.params)[0].sharding.mesh
        shapes = kv_cache.array_shapes(runner.cache_shape, blocks, mesh)
        self._cache = [jnp.zeros(s.shape, s.dtype, device=s.sharding) for s in shapes]
        self._slots = blocks * config.block_size
        self._length = 0
        self._run = jax.jit(partial(_logits, merge=runner.stages[0].merge), donate_argnums=(2,))
        self._states = jax.jit(partial(_states, merge=runner.stages[0].merge))

    def prefill(self, ids: list[int]) -> np.ndarray:
        """Logits [T, V] of a new sequence's tokens, chunk by chunk."""
        self._length = 0
        parts = []
        for start in range(0, len(ids), self._chunk):
            part = ids[start : start + self._chunk]
            parts.append(self._step(part, self._chunk, decode=False)[: len(part)])
        return np.concatenate(parts)

    def decode(self, token: int) -> np.ndarray:
        """Logits [1, V] after one more token."""
        return self._step([token], 1, decode=True)

    def hidden_states(self, ids: list[int]) -> list[np.ndarray]:
        """Embedding, output of each layer and of the final norm, [T, D] each, in one chunk."""
        size = 1 << (len(ids) - 1).bit_length()
        self._length = 0
        batch = self._batch(ids, size, decode=False)
        states = self._states(self._runner.params, batch, self._cache)
        return [np.asarray(state, np.float32)[: len(ids)] for state in states]

    def _step(self, ids: list[int], size: int, *, decode: bool) -> np.ndarray:
        batch = self._batch(ids, size, decode=decode)
        logits, self._cache = self._run(self._runner.params, batch, self._cache)
        self._length += len(ids)
        return np.asarray(logits)

    def _batch(self, ids: list[int], size: int, *, decode: bool) -> ForwardBatch:
        block = self._config.block_size
        count = len(ids)
        tokens, positions = np.zeros((2, size), np.int32)
        slots = self._slots + np.arange(size, dtype=np.int32)
        tokens[:count] = ids
        positions[:count] = self._length + np.arange(count)
        filled = positions[:count]
        slots[:count] = self._table[filled // block] * block + filled % block
        attention: Any = AttentionMetadata(
            query_start=jnp.array([0, count], jnp.int32),
            seq_lens=jnp.array([self._length + count], jnp.int32),
            block_tables=jnp.asarray(self._table[None]),
            slot_mapping=jnp.asarray(slots),
            block_size=block,
            decode_only=decode,
            backend=self._config.attention_backend,
        )
        return ForwardBatch(jnp.asarray(tokens), jnp.asarray(positions), attention)
