"""From an EngineConfig to a loaded, warmed-up ModelRunner, with a table of the times."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxllm.config import EngineConfig
from jaxllm.converters.architectures import name_map_for
from jaxllm.converters.checkpoint import Checkpoint, open_checkpoint
from jaxllm.converters.checksums import verify_files
from jaxllm.converters.loader import load_params
from jaxllm.converters.model_config import read_model_config
from jaxllm.converters.renamed import after_load, with_registered_names
from jaxllm.converters.tied_head import effective_config
from jaxllm.engine.distributed.agree import least
from jaxllm.registration import load_plugins, resolve
from jaxllm.runner.kv_cache import CacheShape
from jaxllm.runner.memory import MemoryPlan, plan_memory
from jaxllm.runner.mesh import make_mesh
from jaxllm.runner.model_runner import ModelRunner
from jaxllm.runner.stages import check_stages
from jaxllm.runner.weights import (
    AbstractModel,
    ModelStage,
    build_abstract,
    model_stages,
    on_stages,
    stage_params,
    unflatten,
)

logger = logging.getLogger(__name__)

Log = Callable[[str], None]


@dataclass(slots=True)
class Phases:
    """Times of the start-up's phases, in seconds."""

    log: Log
    times: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.times[name] = time.perf_counter() - start
        self.log(f"{name}: {self.times[name]:.1f} s")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the engine needs to know of the model it runs.

    Attributes:
        config: resolved: nothing is None that matters.
        eos_token_ids: of config.json and generation_config.json together.
        generation_config: the file's contents, {} if there is none.
        memory: of a device of each pipeline stage.
    """

    config: EngineConfig
    runner: ModelRunner
    vocab_size: int
    eos_token_ids: frozenset[int]
    generation_config: dict[str, Any]
    memory: list[MemoryPlan]
    phases: dict[str, float]


def configure_jax(config: EngineConfig) -> None:
    """Settings that JAX reads before it first touches a device."""
    # The share of the GPU's memory is a variable of JAX's; there is no other way to set it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{config.gpu_memory_utilization:.3f}")
    folder = config.compilation_cache_dir
    if folder is None:
        folder = str(Path.home() / ".cache" / "jaxllm" / "compilation")
    if folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # NVLink multicast needs a fabric that is set up for it, and virtual machines often have none;
    # NCCL then fails at the first sum. A decode step's sums are too small to gain by it.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


def eos_ids(*configs: dict[str, Any]) -> frozenset[int]:
    """The eos_token_id of each config, which may be an id, a list of them, or missing."""
    ids: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)


def dtype_reason(asked: str, chosen: str, hf_config: dict[str, Any], platform: str) -> str:
    """Which dtype is computed in, and why; `dtype` of config.json wins over `torch_dtype`."""
    why = f"auto on a {platform.upper()}" if asked == "auto" else "as asked"
    found = {key: hf_config[key] for key in ("dtype", "torch_dtype") if hf_config.get(key)}
    if not found:
        return f"dtype {chosen}: {why}; config.json names none"
    key, value = next(iter(found.items()))
    line = f"dtype {chosen}: {why}; config.json's {key} is {value}"
    if len(set(map(str, found.values()))) > 1:
        line += f" (and its older torch_dtype, {found['torch_dtype']}, does not count)"
    return line


def _find_checkpoint(config: EngineConfig) -> Checkpoint:
    checkpoint = open_checkpoint(
        config.model,
        revision=config.revision,
        load_format=config.load_format,
        quantization=config.quantization,
        check=verify_files if "sha256" in config.verification else None,
    )
    load_plugins()
    return with_registered_names(checkpoint)


def _load_params(
    config: EngineConfig,
    model: AbstractModel,
    checkpoint: Checkpoint,
    hf_config: dict[str, Any],
    model_config: Any,
) -> dict[str, jax.Array]:
    architectures = hf_config["architectures"]
    name_map = name_map_for(architectures).on_mesh(
        model_config.kv_replicas, model_config.padded_vocab_size - model_config.vocab_size
    )
    finite = "finite" in config.verification
    params = load_params(
        model.shapes,
        checkpoint,
        name_map,
        hf_config,
        progress=sys.stderr.isatty(),
        finite=finite,
    )
    return after_load(architectures, params, model.shapes, model_config)


def _cache_shape(model_config: Any, resolved: EngineConfig) -> CacheShape:
    return CacheShape(
        num_layers=model_config.num_hidden_layers,
        num_kv_heads=model_config.num_key_value_heads,
        head_dim=model_config.head_dim,
        block_size=resolved.block_size,
        dtype=jax.numpy.dtype(resolved.dtype),
    )


def _log_memory(stages: list[ModelStage], memory: list[MemoryPlan], log: Log) -> None:
    for each, plan in zip(stages, memory, strict=True):
        if len(stages) > 1:
            layers = each.stage.layers
            log(f"stage {each.stage.index + 1}, layers {layers.start} to {layers.stop - 1}:")
        for line in plan.lines():
            log(line)


def load_model(config: EngineConfig, *, offline: bool, log: Log = logger.info) -> LoadedModel:
    """Reads the checkpoint, fills the parameters, sizes the cache, compiles and warms up.

    Raises:
        ValueError, FileNotFoundError: config or checkpoint cannot be served; says why.
    """
    configure_jax(config)
    phases = Phases(log)
    with phases("find the checkpoint"):
        checkpoint = _find_checkpoint(config)
        hf_config = effective_config(checkpoint)
        model_class, model_config = read_model_config(resolve, hf_config, checkpoint.path)
        model_config = model_config.with_tensor_parallel(config.tensor_parallel_size)
        check_stages(model_config.num_hidden_layers, config.pipeline_parallel_size)
    with phases("find the devices"):
        mesh = make_mesh(
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
        )
    resolved = config.resolve(
        platform=mesh.devices.flat[0].platform,
        context_length=model_config.context_length,
        offline=offline,
    )
    log(dtype_reason(config.dtype, resolved.dtype, hf_config, mesh.devices.flat[0].platform))
    model = build_abstract(model_class, model_config, resolved.dtype, mesh)
    stages = model_stages(model, mesh)
    with phases("load the weights"):
        flat = _load_params(config, on_stages(model, stages), checkpoint, hf_config, model_config)
        params = stage_params(flat, stages) if len(stages) > 1 else unflatten(flat)
    cache_shape = _cache_shape(model_config, resolved)
    with phases("plan the memory"):
        vocab_size = model_config.vocab_size
        memory = plan_memory(resolved, stages, params, cache_shape, vocab_size)
        num_blocks = least(memory[0].num_blocks)
        memory = [plan.with_blocks(num_blocks) for plan in memory]
    _log_memory(stages, memory, log)
    runner = ModelRunner(
        resolved,
        stages,
        params,
        cache_shape=cache_shape,
        num_blocks=num_blocks,
        vocab_size=vocab_size,
    )
    with phases("compile, allocate and warm up"):
        runner.warm_up(log)
    return LoadedModel(
        config=resolved,
        runner=runner,
        vocab_size=vocab_size,
        eos_token_ids=eos_ids(checkpoint.config, checkpoint.generation_config),
        generation_config=checkpoint.generation_config,
        memory=memory,
        phases=phases.times,
    )
