"""What would fit on devices of a size: the plan's table, and the changes that would make it fit.

From config.json and what the checkpoint's files say of their tensors; no weights are read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from jaxllm.config import EngineConfig
from jaxllm.converters.checkpoint import locate, open_checkpoint
from jaxllm.converters.load_report import merge_numbers
from jaxllm.converters.safetensors_folder import INDEX_FILE, read_json
from jaxllm.models.base import ModelConfig
from jaxllm.registration import resolve
from jaxllm.runner.estimate import (
    DivisionError,
    Parallel,
    Shapes,
    estimate,
)
from jaxllm.runner.kv_cache import GIB, CacheShape
from jaxllm.runner.memory import MemoryPlan, check_fit
from jaxllm.runner.mesh import PP_AXIS, TP_AXIS
from jaxllm.runner.model_runner import make_buckets
from jaxllm.runner.weights import build_abstract

MOST_STAGES = 16


@dataclass(frozen=True)
class Request:
    """What is asked: a model's shapes on devices of a size.

    Attributes:
        model: as its devices share it; `shapes` likewise.
        whole: the model for one device.
        config: resolved.
        memory: bytes of a device, of which the engine may use a share.
    """

    model_class: type
    whole: ModelConfig
    model: ModelConfig
    shapes: Shapes
    config: EngineConfig
    memory: int
    parallel: Parallel
    notes: tuple[str, ...] = field(default=())

    def plan(self) -> tuple[MemoryPlan, CacheShape, int]:
        """The fullest device's plan, a token's shape there, and its pipeline stage."""
        total = int(self.memory * self.config.gpu_memory_utilization)
        return estimate(self.shapes, self.model, self.config, total, self.parallel)

    def over(self, tp: int) -> "Request":
        """The request with its layers shared by `tp` devices."""
        model = self.whole.with_tensor_parallel(tp)
        return replace(
            self,
            model=model,
            shapes=_declare(self.model_class, model, self.config.dtype),
            config=self.config.replace(tensor_parallel_size=tp),
            parallel=replace(self.parallel, tp=tp),
        )

    def problem(self) -> str:
        """Why it does not fit, "" if it does."""
        plan, shape, _ = self.plan()
        try:
            check_fit(self.config, shape, plan)
        except ValueError as error:
            return str(error)
        return ""


def make_request(config: EngineConfig, memory: int, parallel: Parallel) -> Request:
    """Reads the model's configuration and declares its parameters.

    Raises:
        ValueError, OSError, ImportError: there is no such model, or it is not supported.
    """
    path = locate(config.model, revision=config.revision, weights=False)
    notes: list[str] = []
    if path.suffix == ".gguf":
        # Imported here, since the other formats need no gguf package.
        from jaxllm.converters.gguf_checkpoint import open_gguf

        gguf = open_gguf(path)
        hf_config = dict(gguf.config)
        types = ", ".join(f"{count} {name}" for name, count in gguf.type_histogram.items())
        notes.append(f"tensors by type: {types}")
    else:
        checkpoint = open_checkpoint(str(path), load_format="dummy")
        hf_config = dict(checkpoint.config)
        notes += _index_notes(path, hf_config)
        scheme = getattr(checkpoint, "quantization", None)
        if scheme is not None:
            notes.append(f"quantized ({scheme}): planned as it is held, dequantized")
    model_class = resolve(hf_config.get("architectures") or [])
    model = model_class.Config.from_hf(hf_config)
    resolved = config.resolve(platform="gpu", context_length=model.context_length, offline=False)
    return Request(model_class, model, model, {}, resolved, memory, parallel, tuple(notes)).over(
        parallel.tp
    )


def _declare(model_class: type, model: ModelConfig, dtype: str) -> Shapes:
    mesh = AbstractMesh((1, 1), (PP_AXIS, TP_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))
    return build_abstract(model_class, model, dtype, mesh).shapes


def _index_notes(path: Path, hf_config: dict[str, Any]) -> Iterator[str]:
    if not (path / INDEX_FILE).is_file():
        return
    index = read_json(path / INDEX_FILE)
    weights = index.get("weight_map")
    if not isinstance(weights, dict):
        return
    size = (index.get("metadata") or {}).get("total_size")
    size_text = f", {size / GIB:.3f} GiB" if isinstance(size, int | float) else ""
    yield f"checkpoint: {len(weights)} tensors in {len(set(weights.values()))} files{size_text}"
    if hf_config.get("tie_word_embeddings") and "lm_head.weight" in weights:
        yield "tied in config.json, but with a head: if the two differ, the head is loaded as well"


def report(request: Request) -> Iterator[str]:
    """The plan, line by line."""
    plan, shape, stage = request.plan()
    config, parallel = request.config, request.parallel
    assert config.max_model_len
    yield (
        f"{config.model}: {request.model.architecture}, {config.dtype}, "
        f"{request.model.num_hidden_layers} layers; {parallel.tp * parallel.pp} device(s) of "
        f"{request.memory / GIB:.2f} GiB, of which {config.gpu_memory_utilization:.0%} may be used"
    )
    yield from (f"  {note}" for note in request.notes)
    where = f", stage {stage + 1} of {parallel.pp}, the fullest" if parallel.pp > 1 else ""
    yield f"bytes a device{where} (the largest step is an estimate):"
    yield from plan.lines()
    blocks = -(-config.max_model_len // config.block_size)
    fitting = max(plan.budget, 0) // shape.bytes_per_block * config.block_size
    yield f"cache a token: {shape.bytes_per_token} bytes a device"
    yield f"longest context that fits: {min(fitting, request.model.context_length)} tokens"
    yield f"requests of full length ({config.max_model_len} tokens) at once: " + str(
        min(plan.num_blocks // blocks, config.max_num_seqs or 0)
    )
    yield "parameters, and the axes that tensor parallelism splits:"
    yield from (f"  {name}  {detail}" for name, detail in merge_numbers(_groups(request)))
    buckets = list(make_buckets(config, gpu=True))
    yield f"buckets to be compiled ({len(buckets)}):"
    yield "  " + ", ".join(map(str, buckets))


def _groups(request: Request) -> Iterator[tuple[str, str]]:
    for name, leaf in request.shapes.items():
        spec = getattr(leaf.sharding, "spec", ())
        axes = ", ".join(str(axis) if axis else "-" for axis in spec)
        yield name, f"{list(leaf.shape)} ({axes})" if any(spec) else f"{list(leaf.shape)} whole"


def changes_that_fit(request: Request) -> Iterator[str]:
    """Single flags, each with the value nearest to what was asked, that make it fit."""
    plan, _, _ = request.plan()
    for flag, candidates in _candidates(request, plan):
        for value, changed in candidates:
            if _fits(changed):
                yield f"{flag} {value}"
                break


def _fits(request: Request) -> bool:
    try:
        return not request.problem()
    except DivisionError:
        return False


def _candidates(
    request: Request, plan: MemoryPlan
) -> Iterator[tuple[str, Iterator[tuple[object, Request]]]]:
    config, parallel = request.config, request.parallel
    assert config.max_num_seqs
    assert config.max_num_batched_tokens

    def setting(name: str, values: Sequence[Any]) -> tuple[str, Iterator[tuple[object, Request]]]:
        changed: Callable[[Any], EngineConfig] = lambda value: config.replace(**{name: value})  # noqa: E731
        flag = "--" + name.replace("_", "-")
        return flag, ((value, replace(request, config=changed(value))) for value in values)

    yield setting("max_model_len", [plan.tokens] if plan.num_blocks else [])
    most = int(config.gpu_memory_utilization * 100)
    yield setting("gpu_memory_utilization", [share / 100 for share in range(most + 1, 98)])
    tokens = config.max_num_batched_tokens
    halves = [tokens >> i for i in range(1, 8) if tokens >> i >= max(config.max_num_seqs, 256)]
    yield setting("max_num_batched_tokens", halves)
    seqs = config.max_num_seqs
    yield setting("max_num_seqs", [seqs >> i for i in range(1, 8) if seqs >> i])
    if config.dtype == "float32":
        narrow = _with_dtype(request, "bfloat16")
        yield "--dtype", iter([("bfloat16", narrow)])
    sizes = [size for size in request.whole.tensor_parallel_sizes() if size > parallel.tp]
    yield "--tensor-parallel-size", ((n, request.over(n)) for n in sizes)
    stages = range(parallel.pp + 1, min(MOST_STAGES, request.model.num_hidden_layers) + 1)
    yield (
        "--pipeline-parallel-size",
        ((n, replace(request, parallel=replace(parallel, pp=n))) for n in stages),
    )


def _with_dtype(request: Request, dtype: Any) -> Request:
    shapes = {
        name: jax.ShapeDtypeStruct(leaf.shape, jax.numpy.dtype(dtype), sharding=leaf.sharding)
        for name, leaf in request.shapes.items()
    }
    return replace(request, shapes=shapes, config=request.config.replace(dtype=dtype))
