"""What an engine would hold on a device, from shapes alone: nothing is read, run or compiled."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.models.base import ModelConfig
from jaxllm.runner.kv_cache import CacheShape
from jaxllm.runner.memory import Holders, MemoryPlan, divide, stage_cache
from jaxllm.runner.mesh import TP_AXIS
from jaxllm.runner.sampler import result_width
from jaxllm.runner.stages import DivisionError, Stage, check_stages, make_stages

MATMUL_SCRATCH = 33 << 20
"""cuBLAS's workspace on Hopper and what goes with it, as XLA's own figures show it."""
SAMPLER_COPIES = 6
"""Arrays [B, V] of four bytes that the full sampler has alive at once, at most."""
STATE_BYTES = 10
"""Of SamplerRows, a slot and token of the vocabulary."""

Shapes = Mapping[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class Parallel:
    """Over how many devices: tp share each layer, pp share out the layers."""

    tp: int = 1
    pp: int = 1


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What a device of a pipeline stage holds, and `shape`: what it keeps of a token."""

    stage: Stage
    plan: MemoryPlan
    shape: CacheShape


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
    check_stages(config.num_hidden_layers, parallel.pp)
    for name, leaf in shapes.items():
        for axis in split_axes(leaf):
            if leaf.shape[axis] % parallel.tp:
                raise DivisionError(
                    f"--tensor-parallel-size {parallel.tp} does not divide {name} "
                    f"{list(leaf.shape)}: axis {axis} has size {leaf.shape[axis]}."
                )


def estimate(
    shapes: Shapes, model: ModelConfig, config: EngineConfig, total: int, parallel: Parallel
) -> list[StagePlan]:
    """The plan of each pipeline stage, each with the blocks that it has room for itself.

    Args:
        model: as its devices share it (`with_tensor_parallel`), and so are `shapes`.
        config: resolved.
        total: bytes that the engine may use on a device.

    Raises:
        DivisionError: see `check_division`.
    """
    check_division(shapes, model, parallel)
    whole = CacheShape(
        num_layers=model.num_hidden_layers,
        num_kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        dtype=np.dtype(jax.numpy.dtype(config.dtype)),
    )
    plans = []
    for stage in make_stages(shapes, parallel.pp):
        holders = Holders(
            total=total,
            weights=sum(shard_bytes(shapes[name], parallel.tp) for name in stage.names),
            sampler=_sampler_bytes(model, config, parallel.tp, stage),
            activations=_step_bytes(model, config, parallel.tp, stage),
        )
        shape = stage_cache(whole, stage, parallel.tp)
        plans.append(StagePlan(stage, divide(config, shape, holders), shape))
    return plans


def _sampler_bytes(model: ModelConfig, config: EngineConfig, tp: int, stage: Stage) -> int:
    """Rows of the last stage, and the last tokens of each lane, on the first one as well."""
    assert config.max_num_seqs
    rows = model.padded_vocab_size // tp * STATE_BYTES if stage.last else 0
    copies = stage.last + (stage.first and stage.count > 1)
    return config.max_num_seqs * (rows + copies * stage.count * 4)


def _step_bytes(model: ModelConfig, config: EngineConfig, tp: int, stage: Stage) -> int:
    """Scratch of the largest step, and the results of all steps that may be under way, as the
    engine counts them; every stage but the first holds what the one before sent it, too.

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
    sampler = copies * rows * model.vocab_size * 4 if stage.last else 0
    hidden = tokens * model.hidden_size * width
    result = requests * result_width(config.max_logprobs) * 4 if stage.last else 0
    received = 0 if stage.first else hidden
    return max(layer, sampler) + MATMUL_SCRATCH + (stage.count + 1) * (hidden + result + received)
