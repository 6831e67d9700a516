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
from jaxllm.converters.architectures import name_map_for
from jaxllm.converters.checkpoint import Checkpoint, locate, open_checkpoint
from jaxllm.converters.header_check import check_headers, check_names
from jaxllm.converters.load_report import merge_numbers
from jaxllm.converters.model_config import read_model_config
from jaxllm.converters.renamed import registered_names, with_registered_names
from jaxllm.converters.safetensors_folder import SAFETENSORS
from jaxllm.converters.torch_folder import PYTORCH
from jaxllm.models.base import ModelConfig
from jaxllm.registration import resolve
from jaxllm.runner.build import make_buckets
from jaxllm.runner.estimate import (
    Parallel,
    Shapes,
    StagePlan,
    estimate,
)
from jaxllm.runner.kv_cache import GIB, CacheShape
from jaxllm.runner.memory import MemoryPlan, check_fit, with_fewest_blocks
from jaxllm.runner.mesh import PP_AXIS, TP_AXIS
from jaxllm.runner.stages import DivisionError
from jaxllm.runner.weights import build_abstract

MOST_STAGES = 16
_LAYOUTS = (SAFETENSORS, PYTORCH)


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

    def stages(self) -> list[StagePlan]:
        """What each pipeline stage has room for."""
        total = int(self.memory * self.config.gpu_memory_utilization)
        return estimate(self.shapes, self.model, self.config, total, self.parallel)

    def plan(self) -> tuple[MemoryPlan, CacheShape, int]:
        """The fullest device's plan, a token's shape there, and its pipeline stage."""
        found = min(self.stages(), key=lambda each: (each.plan.num_blocks, each.plan.budget))
        return found.plan, found.shape, found.stage.index

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
    """Reads the model's configuration, declares its parameters, and compares them with the
    checkpoint's headers or its index, if they are there.

    Raises:
        ValueError, OSError, ImportError: there is no such model, it is not supported, or its
            tensors are not the checkpoint's.
    """
    path = locate(config.model, revision=config.revision, weights=False)
    checkpoint = _open_headers(path, config)
    model_class, model = read_model_config(resolve, checkpoint.config, path)
    resolved = config.resolve(platform="gpu", context_length=model.context_length, offline=False)
    request = Request(model_class, model, model, {}, resolved, memory, parallel).over(parallel.tp)
    return replace(request, notes=(*_notes(checkpoint), *_compared(request, checkpoint)))


def _open_headers(path: Path, config: EngineConfig) -> Checkpoint:
    """With its tensors' headers if its files are all there, else the configuration alone."""
    load_format = config.load_format
    if path.is_dir() and (path / "config.json").is_file() and load_format != "gguf":
        layouts = [layout for layout in _LAYOUTS if layout.in_folder(path)]
        if not layouts or not layouts[0].is_whole(path):
            load_format = "dummy"
    return open_checkpoint(str(path), load_format=load_format, quantization=config.quantization)


def _compared(request: Request, checkpoint: Checkpoint) -> Iterator[str]:
    """Raises LoadError if the checkpoint's tensors are not the model's; says what was compared."""
    model, architectures = request.model, checkpoint.config["architectures"]
    name_map = name_map_for(architectures).on_mesh(
        model.kv_replicas, model.padded_vocab_size - model.vocab_size
    )
    if checkpoint.source != "dummy":
        check_headers(request.shapes, with_registered_names(checkpoint), name_map)
        yield "its tensors' names and shapes are those of the model"
        return
    names = _indexed(checkpoint)
    if names and request.config.load_format != "dummy" and not _scheme(checkpoint):
        known = registered_names(names, architectures)
        check_names(request.shapes, known, name_map, checkpoint.path)
        yield "its index has the model's names (without the files, no shapes are compared)"


def _indexed(checkpoint: Checkpoint) -> list[str]:
    path = checkpoint.path
    return next((names for layout in _LAYOUTS if (names := layout.names(path))), [])


def _declare(model_class: type, model: ModelConfig, dtype: str) -> Shapes:
    mesh = AbstractMesh((1, 1), (PP_AXIS, TP_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))
    return build_abstract(model_class, model, dtype, mesh).shapes


def _notes(checkpoint: Checkpoint) -> Iterator[str]:
    """What there is to say of the files."""
    names = list(checkpoint.tensors) or _indexed(checkpoint)
    nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
    if names:
        yield f"checkpoint: {len(names)} tensors" + (f", {nbytes / GIB:.3f} GiB" if nbytes else "")
    if checkpoint.config.get("tie_word_embeddings") and "lm_head.weight" in names:
        yield "tied in config.json, but with a head: if the two differ, the head is loaded as well"
    types = getattr(checkpoint, "type_histogram", {})
    if types:
        yield "tensors by type: " + ", ".join(f"{count} {name}" for name, count in types.items())
    if _scheme(checkpoint):
        yield f"quantized ({_scheme(checkpoint)}): planned as it is held, dequantized"


def _scheme(checkpoint: Checkpoint) -> str | None:
    return getattr(checkpoint, "quantization", None)


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
    yield from _stage_lines(request)
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


def _stage_lines(request: Request) -> Iterator[str]:
    """A line for each of several pipeline stages."""
    found = request.stages()
    if len(found) == 1:
        return
    yield "bytes a device of each stage, with the blocks that fit on all of them:"
    plans = with_fewest_blocks([each.plan for each in found])
    for each, plan in zip(found, plans, strict=True):
        taken, layers = plan.holders, each.stage.layers
        yield (
            f"  stage {each.stage.index + 1}, layers {layers.start} to {layers.stop - 1}: "
            f"weights {taken.weights}, sampler state {taken.sampler}, "
            f"largest step {taken.activations}, block cache {plan.cache}"
        )


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
