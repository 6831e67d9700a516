"""The jitted functions of a pipeline stage: the layers it has, and on the last one the head."""

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jaxllm.models.batch import ForwardBatch, KVCache
from jaxllm.models.causal_lm import run_layers
from jaxllm.runner.batch_layout import BatchLayout
from jaxllm.runner.sampler import SamplerRows
from jaxllm.runner.stages import Stage
from jaxllm.runner.step import StepOptions, forward_batch, next_logits
from jaxllm.runner.weights import Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PipelineState:
    """What stays on the devices from step to step.

    Attributes:
        caches: of each stage's layers.
        rows: on the last stage.
        last_tokens: i32[slots] for each lane, on the last stage: what each slot sampled last. One
            array a lane, so that a lane's next step waits for its own tokens only.
        fed: the same, on the first stage.
    """

    caches: list[KVCache]
    rows: SamplerRows
    last_tokens: list[jax.Array]
    fed: list[jax.Array]

    @property
    def kv_cache(self) -> KVCache:
        """The cache of all layers."""
        return [array for cache in self.caches for array in cache]


def run_stage(
    params: Params,
    cache: KVCache,
    packed: Int[Array, "packed"],
    given: jax.Array,
    *,
    stage: Stage,
    layout: BatchLayout,
    options: StepOptions,
) -> tuple[Any, ...]:
    """A stage's part of a step.

    Args:
        given: the last tokens, i32[slots], to the first stage; to the others the hidden states,
            [T, D], of the one before.

    Returns:
        The new cache, and the hidden states; of the last stage what `run_model` returns.
    """
    fields, model = layout.unpack(packed), options.merge(params)
    batch = forward_batch(fields, given if stage.first else None, layout, options)
    x = given
    if stage.first:
        with jax.named_scope("embed"):
            x = model.embed(batch)
    cache, x = _run_layers(model, batch, cache, x, stage)
    if not stage.last:
        return cache, x
    with jax.named_scope("final_norm"):
        hidden = model.norm(x)
    logits, hidden = next_logits(model, hidden, fields, layout)
    return cache, (packed[: layout.sampler_size], logits), hidden


def _run_layers(
    model: Any, batch: ForwardBatch, cache: KVCache, x: Float[Array, "T D"], stage: Stage
) -> tuple[KVCache, Float[Array, "T D"]]:
    rope = model.rotary(batch)  # each stage makes its own: cheaper than sending it on
    x, cache = run_layers(model.layers, stage.layers, x, rope, cache, batch.attention)
    return cache, x
