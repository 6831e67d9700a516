"""The jitted functions of a pipeline stage: the layers it has, and on the last one the head."""

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jaxllm.models.batch import ForwardBatch, KVCache
from jaxllm.models.causal_lm import run_layer
from jaxllm.runner.batch_layout import BatchLayout
from jaxllm.runner.sampler import SamplerRows
from jaxllm.runner.stages import Stage
from jaxllm.runner.step import ForSampler, StepOptions, forward_batch, next_logits
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


def run_first(
    params: Params,
    cache: KVCache,
    packed: Int[Array, "packed"],
    last_tokens: Int[Array, "slots"],
    *,
    stage: Stage,
    layout: BatchLayout,
    options: StepOptions,
) -> tuple[KVCache, Float[Array, "T D"]]:
    """Embeds a step's tokens and runs the first layers."""
    model = options.merge(params)
    batch = forward_batch(layout.unpack(packed), last_tokens, layout, options)
    with jax.named_scope("embed"):
        x = model.embed(batch)
    return _run_layers(model, batch, cache, x, stage)


def run_middle(
    params: Params,
    cache: KVCache,
    packed: Int[Array, "packed"],
    x: Float[Array, "T D"],
    *,
    stage: Stage,
    layout: BatchLayout,
    options: StepOptions,
) -> tuple[KVCache, Float[Array, "T D"]]:
    """Runs the layers of a stage that is neither first nor last."""
    batch = forward_batch(layout.unpack(packed), None, layout, options)
    return _run_layers(options.merge(params), batch, cache, x, stage)


def run_last(
    params: Params,
    cache: KVCache,
    packed: Int[Array, "packed"],
    x: Float[Array, "T D"],
    *,
    stage: Stage,
    layout: BatchLayout,
    options: StepOptions,
) -> tuple[KVCache, ForSampler, Float[Array, "T D"] | None]:
    """Runs the last layers and the head; see `run_model` for what it returns."""
    fields = layout.unpack(packed)
    model = options.merge(params)
    batch = forward_batch(fields, None, layout, options)
    cache, x = _run_layers(model, batch, cache, x, stage)
    with jax.named_scope("final_norm"):
        hidden = model.norm(x)
    logits, hidden = next_logits(model, hidden, fields, layout)
    return cache, (packed[: layout.sampler_size], logits), hidden


def _run_layers(
    model: Any, batch: ForwardBatch, cache: KVCache, x: Float[Array, "T D"], stage: Stage
) -> tuple[KVCache, Float[Array, "T D"]]:
    rope = model.rotary(batch)  # each stage makes its own: cheaper than sending it on
    cache = list(cache)
    for place, index in enumerate(stage.layers):
        with jax.named_scope(f"layer_{index}"):
            x, cache[place] = run_layer(model.layers[index], x, rope, cache[place], batch.attention)
    return cache, x
