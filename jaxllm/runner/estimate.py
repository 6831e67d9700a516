"""What an engine would hold on a device, from shapes alone: nothing is read, run or compiled."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.models.base import ModelConfig
from jaxllm.runner.kv_cache import CacheShape
from jaxllm.runner.memory import Holders, MemoryPlan, divide
from jaxllm.runner.mesh import TP_AXIS
from jaxllm.runner.sampler import result_width

MATMUL_SCRATCH = 33 << 20
"""cuBLAS's workspace on Hopper and what goes with it, as XLA's own figures show it."""
SAMPLER_COPIES = 6
"""Arrays [B, V] of four bytes that the full sampler has alive at once, at most."""
STATE_BYTES = 10
"""Of SamplerRows, a slot and token of the vocabulary."""

Shapes = Mapping[str, jax.ShapeDtypeStruct]

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class DivisionError(ValueError):
    """Something does not divide over the devices; names it, its size and what would work."""


@dataclass(frozen=True)
class Parallel:
    """Over how many devices: tp share each layer, pp share out the layers."""

    tp: int = 1
    pp: int = 1


def split_axes(leaf: jax.ShapeDtypeStruct) -> list[int]:
    """The axes of a parameter that tensor parallelism splits."""
    spec: Any = getattr(leaf.sharding, "spec", ())
    return [axis for axis, names in enumerate(spec) if TP_AXIS in np.atleast_1d(names).tolist()]


def shard_bytes(leaf: jax.ShapeDtypeStruct, tp: int) -> int:
    """What one of `tp` devices holds of a parameter."""
    parts = math.prod(tp for _ in split_axes(leaf))
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize // parts


def check_division(shapes: Shapes, config: ModelConfig, parallel: Parallel) -> None:
    """Raises DivisionError if a parameter does not split evenly, or there are more stages than
    layers."""
    if parallel.pp > config.num_hidden_layers:
        raise DivisionError(
            f"--pipeline-parallel-size {parallel.pp} exceeds num_hidden_layers = "
            f"{config.num_hidden_layers}: at most {config.num_hidden_layers} works."
        )
    for name, leaf in shapes.items():
        for axis in split_axes(leaf):
            if leaf.shape[axis] % parallel.tp:
                raise DivisionError(
                    f"--tensor-parallel-size {parallel.tp} does not divide {name} "
                    f"{list(leaf.shape)}: axis {axis} has size {leaf.shape[axis]}."
                )


def stage_layers(num_layers: int, stages: int) -> list[range]:
    """The layers of each pipeline stage; the first ones take what is left over."""
    size, rest = divmod(num_layers, stages)
    starts = [stage * size + min(stage, rest) for stage in range(stages + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


def estimate(
    shapes: Shapes, model: ModelConfig, config: EngineConfig, total: int, parallel: Parallel
) -> tuple[MemoryPlan, CacheShape, int]:
    """The plan of the stage that holds the fewest blocks, a token's shape there, and the stage.

    Args:
        model: as its devices share it (`with_tensor_parallel`), and so are `shapes`.
        config: resolved.
        total: bytes that the engine may use on a device.

    Raises:
        DivisionError: see `check_division`.
    """
    check_division(shapes, model, parallel)
    plans = []
    for stage, layers in enumerate(stage_layers(model.num_hidden_layers, parallel.pp)):
        last = stage == parallel.pp - 1
        holders = Holders(
            total=total,
            weights=_weight_bytes(shapes, layers, parallel, first=stage == 0, last=last),
            sampler=_sampler_bytes(model, config, parallel.tp) if last else 0,
            activations=_step_bytes(model, config, parallel.tp, last=last),
        )
        shape = CacheShape(
            num_layers=len(layers),
            num_kv_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            block_size=config.block_size,
            dtype=np.dtype(jax.numpy.dtype(config.dtype)),
        ).on_one_of(parallel.tp)
        plans.append((divide(config, shape, holders), shape, stage))
    return min(plans, key=lambda entry: (entry[0].num_blocks, entry[0].budget))


def _weight_bytes(
    shapes: Shapes, layers: range, parallel: Parallel, *, first: bool, last: bool
) -> int:
    tied = "lm_head.weight" not in shapes
    total = 0
    for name, leaf in shapes.items():
        found = _LAYER.match(name)
        if found:
            here = int(found[1]) in layers
        elif name == "model.embed_tokens.weight":
            here = first or (last and tied)
        else:
            here = last
        total += shard_bytes(leaf, parallel.tp) if here else 0
    return total


def _sampler_bytes(model: ModelConfig, config: EngineConfig, tp: int) -> int:
    assert config.max_num_seqs
    return config.max_num_seqs * (model.padded_vocab_size // tp * STATE_BYTES + 4)


def _step_bytes(model: ModelConfig, config: EngineConfig, tp: int, *, last: bool) -> int:
    """Scratch of the largest step, and two steps' results, as the engine counts them.

    The peak is in a layer's MLP (hidden states twice, gate and up, their product), in its
    attention, or in the sampler. Measured on an H200, in GiB, against this estimate: Llama-3.1-8B
    with 8192 tokens and 256 requests 0.911 (0.943); Qwen3-0.6B with 2048 and 8 0.083 (0.084),
    with 512 and 2 0.045 (0.045).
    """
    assert config.max_num_seqs
    assert config.max_num_batched_tokens
    tokens, requests = config.max_num_batched_tokens, config.max_num_seqs
    width = jax.numpy.dtype(config.dtype).itemsize
    heads = 2 * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    widest = max(3 * model.intermediate_size, heads) // tp
    layer = tokens * ((2 * model.hidden_size + widest) * width + model.head_dim * 4)
    # Each device samples its share of the requests, from all of the vocabulary; what it sends for
    # that is there beside.
    rows, copies = -(-requests // tp), SAMPLER_COPIES + (2 if tp > 1 else 0)
    sampler = copies * rows * model.vocab_size * 4 if last else 0
    result = tokens * model.hidden_size * width + requests * result_width(config.max_logprobs) * 4
    return max(layer, sampler) + MATMUL_SCRATCH + 2 * result
