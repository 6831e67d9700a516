"""The bubble of a pipeline on virtual CPU devices: `python scripts/measure_bubble.py`.

The engine itself runs a tiny model with a layer a stage, after which a custom call notes the time
and sleeps: so a stage takes a known time without taking a core, and four overlap on two cores. What
is traced is the engine's part: the scheduler's lanes, the order of dispatch, the copies from device
to device, and that no stage waits for the host.

Prints for m micro-batches over p stages the share of time that the stages idle, and the formula's:
    steady   in the middle of a long run with m lanes: 1 - min(m, p) / p
    bounded  m steps that do not wait for each other, from the first's start to the last's end:
             (p - 1) / (m + p - 1)
"""

import argparse
import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

FLAG = "--xla_force_host_platform_device_count=8"
PROMPT = 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


@dataclass(frozen=True, slots=True)
class Work:
    """When a stage was at work on a step, in seconds of time.perf_counter."""

    stage: int
    start: float
    end: float


def bubble(trace: Sequence[Work], stages: int, start: float, end: float) -> float:
    """The share of (end - start) * stages in which nothing was done."""
    busy = sum(max(0.0, min(work.end, end) - max(work.start, start)) for work in trace)
    return 1 - busy / (stages * (end - start))


def most_at_once(trace: Sequence[Work]) -> int:
    """The most stages that were at work at one time."""
    edges = sorted([(work.start, 1) for work in trace] + [(work.end, -1) for work in trace])
    most = now = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return most


class _Extension(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("kind", ctypes.c_int), ("next", ctypes.c_void_p))


class _Metadata(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("version_size", ctypes.c_size_t),
        ("version_extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class _MetadataExtension(ctypes.Structure):
    _fields_ = (("base", _Extension), ("metadata", ctypes.POINTER(_Metadata)))


class _CallFrame(ctypes.Structure):
    """The head of XLA_FFI_CallFrame (xla/ffi/api/c_api.h in `jax.ffi.include_dir()`)."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(_MetadataExtension)),
        ("api", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
    )


_HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))
_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE
_work: Callable[[int], None] = lambda stage: None  # noqa: E731
_handlers: list[Any] = []  # they must outlive the programs


def _make_handler(stage: int) -> Any:
    def handle(pointer: Any) -> None:
        frame = pointer[0]
        if frame.extension:  # XLA asks for which version this is
            metadata = frame.extension[0].metadata[0]
            metadata.major, metadata.minor = 0, 1
        elif frame.stage == _EXECUTE:
            _work(stage)

    return _HANDLER(handle)


def _register(stages: int) -> None:
    """Makes the custom calls. JAX's own callbacks would not do: on the CPU it runs programs that
    have some at once, and the caller waits."""
    import jax

    for stage in range(len(_handlers), stages):
        _handlers.append(_make_handler(stage))
        capsule = jax.ffi.pycapsule(ctypes.cast(_handlers[-1], ctypes.c_void_p))
        jax.ffi.register_ffi_target(f"work_of_stage_{stage}", capsule, platform="cpu")


@contextmanager
def traced(work: Callable[[int], None], stages: int) -> Iterator[None]:
    """Within it, programs are made that call `work(stage)` after a stage's layers."""
    import jax

    from jaxllm.runner import stage_step

    global _work
    _register(stages)
    run_layers = stage_step._run_layers

    def run(model: Any, batch: Any, cache: Any, x: Any, stage: Any) -> Any:
        cache, x = run_layers(model, batch, cache, x, stage)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = jax.ffi.ffi_call(f"work_of_stage_{stage.index}", shape, input_output_aliases={0: 0})
        return cache, call(x)

    with mock.patch.object(stage_step, "_run_layers", run):
        _work = work
        yield


def make_engine(folder: Path, stages: int, lanes: int, **changes: Any) -> Any:
    """A LocalEngine of a random model with a layer a stage."""
    from jaxllm import EngineConfig
    from jaxllm.engine.local_engine import LocalEngine

    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": stages}))
    options: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "float32",
        "pipeline_parallel_size": stages,
        "max_num_seqs": lanes,
        "max_num_batched_tokens": PROMPT,
        "num_gpu_blocks_override": 256,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "compilation_cache_dir": "",
    }
    return LocalEngine(EngineConfig(model=str(folder), **(options | changes)))


def generate(engine: Any, count: int, max_tokens: int) -> None:
    """Runs `count` requests, each with a prompt that fills a step."""
    from jaxllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for number in range(count):
        engine.add_request(str(number), [number % 64] * PROMPT, params)
    while engine.has_unfinished_requests():
        engine.step()


def measure(stages: int, seconds: float, steady: Sequence[int], bounded: Sequence[int]) -> None:
    """Prints both tables."""
    trace: list[Work] = []

    def work(stage: int) -> None:
        start = time.perf_counter()
        time.sleep(seconds)
        trace.append(Work(stage, start, time.perf_counter()))

    print(f"{stages} stages of {seconds * 1e3:.0f} ms; idle share: measured, by the formula")
    with tempfile.TemporaryDirectory() as folder, traced(work, stages):
        engine = make_engine(Path(folder), stages, max(*steady, *bounded))
        generate(engine, stages, 3)  # compiles
        for lanes in steady:
            trace.clear()
            generate(engine, lanes, 40)
            first, last = trace[len(trace) // 4].start, trace[-len(trace) // 4].end
            share, formula = bubble(trace, stages, first, last), 1 - min(lanes, stages) / stages
            most = most_at_once(trace)
            print(f"steady   m={lanes:2d}  {share:6.1%}  {formula:6.1%}  at once: {most}")
        for count in bounded:
            trace.clear()
            generate(engine, count, 1)
            first, last = min(w.start for w in trace), max(w.end for w in trace)
            share, formula = bubble(trace, stages, first, last), (stages - 1) / (count + stages - 1)
            most = most_at_once(trace)
            print(f"bounded  m={count:2d}  {share:6.1%}  {formula:6.1%}  at once: {most}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description="The bubble of a pipeline on virtual CPU devices.")
    parser.add_argument("--stages", type=int, default=4, help="p, at most 8")
    parser.add_argument("--milliseconds", type=float, default=20, help="that a stage takes a step")
    args = parser.parse_args(argv)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    stages = args.stages
    counts = (1, 2, stages, 2 * stages, 4 * stages)
    measure(stages, args.milliseconds / 1e3, range(1, stages + 1), counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
