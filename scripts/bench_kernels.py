"""Checks the attention kernels against the reference on this GPU, then times them.

    python scripts/bench_kernels.py [--check-only | --tune] [--only SUBSTRING] [--record]

The checks run the cases of arg_specs.py and the timed shapes themselves. Timings are medians over
random data and random block tables, and each call reads other blocks than the one before it.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from record import record

from jaxllm.pallas_kernels.paged_attention import arg_specs, configs, mosaic_gpu, reference, triton

TOLERANCE = {"bfloat16": 1e-2, "float16": 1e-2, "float32": 1e-4}
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


@dataclass(frozen=True)
class Workload:
    """One timed shape: requests of equal context, in bf16."""

    name: str
    requests: int
    context: int
    queries: int  # a request; 1 is decode, context is a whole prompt
    unit: str
    target: float
    block_size: int = 64
    ragged: bool = False  # contexts spread evenly over 100 … 2 * context
    sets: int = 2  # block tables that the calls cycle through, so that the L2 cache stays cold

    @property
    def lens(self) -> np.ndarray:
        if not self.ragged:
            return np.full(self.requests, self.context, np.int32)
        spread = np.linspace(100, 2 * self.context, self.requests).astype(np.int32)
        return np.random.default_rng(1).permutation(spread)

    def amount(self) -> float:
        """Bytes of keys and values, or floating point operations of causal attention."""
        if self.queries == 1:
            return float(self.lens.sum()) * 2 * KV_HEADS * HEAD_DIM * 2
        seen = self.queries * (self.context - self.queries) + self.queries * (self.queries + 1) / 2
        return 4.0 * self.requests * seen * HEADS * HEAD_DIM

    def figure(self, seconds: float) -> float:
        if self.unit == "us":
            return seconds * 1e6
        return self.amount() / seconds / 1e12


WORKLOADS = (
    Workload("decode B=64 ctx 4096", 64, 4096, 1, "TB/s", 3.9),
    Workload("decode B=256 ctx 1024", 256, 1024, 1, "TB/s", 3.8),
    Workload("decode B=64 ctx 1024", 64, 1024, 1, "TB/s", 3.4),
    Workload("decode B=64 ctx 4096 block 16", 64, 4096, 1, "TB/s", 3.9, block_size=16),
    Workload("decode B=256 ctx 100-2048 mixed", 256, 1024, 1, "TB/s", 3.6, ragged=True),
    Workload("decode B=64 ctx 4096 cache > 4 GiB", 64, 4096, 1, "TB/s", 3.9, sets=5),
    Workload("decode B=16 ctx 2048", 16, 2048, 1, "TB/s", 3.0),
    Workload("decode B=1 ctx 8192", 1, 8192, 1, "us", 20.0, sets=32),
    Workload("decode B=1 ctx 1024", 1, 1024, 1, "us", 12.0, sets=32),
    Workload("prefill 4x4096", 4, 4096, 4096, "TFLOP/s", 500.0),
    Workload("prefill 4x4096 block 16", 4, 4096, 4096, "TFLOP/s", 500.0, block_size=16),
    Workload("prefill chunk 4x2048 of 8192", 4, 8192, 2048, "TFLOP/s", 500.0),
    Workload("prefill 40x200", 40, 200, 200, "TFLOP/s", 100.0),
)


def arrays(work: Workload) -> tuple[jax.Array, jax.Array, list[jax.Array], jax.Array]:
    """q, kv, block tables over disjoint blocks, and seq_lens."""
    rng = np.random.default_rng(0)
    lens = work.lens
    width = -(-int(lens.max()) // work.block_size)
    blocks = work.requests * width
    tables = rng.permutation(blocks * work.sets).reshape(work.sets, work.requests, width)
    keys = jax.random.split(jax.random.key(0), 2)
    tokens = work.requests * work.queries
    q = jax.random.normal(keys[0], (tokens, HEADS, HEAD_DIM), jnp.bfloat16)
    rows = blocks * work.sets * work.block_size
    kv = jax.random.normal(keys[1], (rows, 2, KV_HEADS, HEAD_DIM), jnp.bfloat16)
    return q, kv, [jnp.asarray(t, jnp.int32) for t in tables], jnp.asarray(lens)


def attention(work: Workload, backend: Any, **kwargs: Any) -> Callable[..., jax.Array]:
    """(q, kv, tables, lens) -> out for a workload."""
    options = {"block_size": work.block_size, "scale": HEAD_DIM**-0.5, **kwargs}
    if work.queries == 1:
        return lambda q, kv, tables, lens: backend.decode_attention(q, kv, tables, lens, **options)

    def ragged(q, kv, tables, lens):
        starts = jnp.arange(work.requests + 1, dtype=jnp.int32) * work.queries
        return backend.ragged_attention(q, kv, tables, lens, starts, **options)

    return ragged


def serves(work: Workload, backend: Any) -> bool:
    """Whether the backend has the operation at all."""
    return work.queries > 1 or hasattr(backend, "decode_attention")


def seconds_a_call(work: Workload, attend: Callable[..., jax.Array]) -> float:
    """Median device time of one call.

    A short call costs less than its dispatch: a chain of them runs in one program, each call's
    output being the next one's query.
    """
    q, kv, tables, lens = arrays(work)
    chain = max(work.sets, 2 if work.amount() > 1e11 else 8)

    @jax.jit
    def run(q, kv, tables, lens):
        for i in range(chain):
            q = attend(q, kv, tables[i % len(tables)], lens)
        return q

    repeats = 10
    for _ in range(3):
        run(q, kv, tables, lens).block_until_ready()
    samples = []
    for _ in range(7):
        begin = time.perf_counter()
        for _ in range(repeats):
            out = run(q, kv, tables, lens)
        out.block_until_ready()
        samples.append((time.perf_counter() - begin) / repeats / chain)
    return statistics.median(samples)


def relative_error(out: jax.Array, expected: jax.Array) -> float:
    """||out - expected|| / ||expected|| in float32; NaN if either holds one."""
    out, expected = out.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.linalg.norm(out - expected) / jnp.maximum(jnp.linalg.norm(expected), 1e-30))


def check_cases(backends: dict[str, Any], only: str, shard: tuple[int, int]) -> int:
    """Runs the shared cases; prints those beyond the tolerance and returns how many there are."""
    failures = runs = 0
    worst: dict[tuple[str, str], float] = {}
    every = itertools.product(arg_specs.CASES, ("bfloat16", "float32"), backends.items())
    for case, dtype, (name, backend) in itertools.islice(every, shard[0], None, shard[1]):
        operation = "decode_attention" if case.decode_only else "ragged_attention"
        if only not in case.name or not case.query_lens or not hasattr(backend, operation):
            continue
        case = dataclasses.replace(case, dtype=dtype)
        arrays, options = arg_specs.make_arguments(case)
        print(f"{name} {case.name} {dtype}", end=" ", flush=True)
        try:
            out = _jitted(getattr(backend, operation), options)(**arrays)
        except NotImplementedError as refusal:
            print(refusal)
            continue
        runs += 1
        rows = sum(case.query_lens)
        expected = _jitted(getattr(reference, operation), options)(**arrays)[:rows]
        error = relative_error(out[:rows], expected)
        right = error <= TOLERANCE[dtype] and bool(jnp.isfinite(out).all())
        worst[name, dtype] = max(worst.get((name, dtype), 0.0), error)
        failures += not right
        print(f"{error:.1e}" if right else f"WRONG {error:.1e}", flush=True)
    summary = ", ".join(f"{n} {d} {e:.1e}" for (n, d), e in sorted(worst.items()))
    print(f"checked {runs}, wrong {failures}; largest errors: {summary}", flush=True)
    return failures


def _jitted(function: Callable[..., jax.Array], options: dict[str, Any]) -> Callable[..., Any]:
    """The function with its options fixed, compiled; sinks count as an array."""
    fixed = {k: v for k, v in options.items() if k != "sinks"}
    return functools.partial(
        jax.jit(functools.partial(function, **fixed)),
        **({"sinks": options["sinks"]} if "sinks" in options else {}),
    )


def check_workload(work: Workload, attend: Callable[..., jax.Array]) -> float:
    """The relative error on the timed shape itself."""
    q, kv, tables, lens = arrays(work)
    expected = jax.jit(attention(work, reference))(q, kv, tables[0], lens)
    return relative_error(jax.jit(attend)(q, kv, tables[0], lens), expected)


def bench(backends: dict[str, Any], only: str, write: bool) -> int:
    """Times every workload with every backend that serves it."""
    failures = 0
    print(f"{'workload':34} {'backend':12} {'time':>9} {'figure':>15} {'target':>8}  error")
    for work in WORKLOADS:
        for name, backend in backends.items():
            if only not in f"{work.name} {name}" or not serves(work, backend):
                continue
            attend = attention(work, backend)
            try:
                error = check_workload(work, attend)
                seconds = seconds_a_call(work, attend)
            except NotImplementedError as refusal:
                print(f"{work.name:34} {name:12} {refusal}")
                continue
            failures += not error <= TOLERANCE["bfloat16"]
            figure = work.figure(seconds)
            print(
                f"{work.name:34} {name:12} {seconds * 1e6:7.1f}us {figure:7.2f} {work.unit:7}"
                f" {work.target:8} {error:.1e}",
                flush=True,
            )
            if write:
                record(
                    f"attention {work.name}", figure, work.unit, backend=name, relative_error=error
                )
    return failures


def candidates(work: Workload) -> Iterator[tuple[str, Any, Any]]:
    """The configurations that --tune tries: backend name, backend, configuration."""
    if work.queries == 1:
        context = int(work.lens.max())
        default = configs.decode_config(work.requests, KV_HEADS, HEAD_DIM, context, jnp.bfloat16)
        for block_kv, warps, stages in (
            (64, 4, 3),
            (64, 4, 2),
            (64, 2, 3),
            (32, 2, 3),
            (128, 8, 2),
        ):
            sizes = {"block_kv": block_kv, "num_warps": warps, "num_stages": stages}
            yield "triton", triton, dataclasses.replace(default, **sizes)
        for splits in (default.num_splits // 2, default.num_splits * 2):
            if splits:
                yield "triton", triton, dataclasses.replace(default, num_splits=splits)
        return
    for block_kv, stages, programs in ((128, 2, 132), (128, 2, 0), (64, 2, 132), (64, 4, 132)):
        config = configs.MosaicConfig(block_kv, stages, programs)
        yield "mosaic_gpu", mosaic_gpu, config
    for sizes in ((128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2)):
        yield "triton", triton, configs.RaggedConfig(*sizes)


def tune(only: str, most: float) -> None:
    """Times all candidates of the workloads; the best belong into configs.json."""
    begin = time.perf_counter()
    for work in WORKLOADS:
        results = []
        for name, backend, config in candidates(work):
            if only not in f"{work.name} {name}" or time.perf_counter() - begin > most:
                continue
            try:
                seconds = seconds_a_call(work, attention(work, backend, config=config))
            except Exception as error:  # a candidate may not compile: that is a result
                print(f"  {name} {config}: {type(error).__name__} {str(error)[:150]!r}")
                continue
            results.append((seconds, name, config))
        for seconds, name, config in sorted(results, key=lambda r: r[0])[:8]:
            sizes = " ".join(f"{k}={v}" for k, v in dataclasses.asdict(config).items())
            print(f"{work.name:34} {name:10} {work.figure(seconds):7.2f} {work.unit:7} {sizes}")
        sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="checks and times the attention kernels")
    parser.add_argument("--check-only", action="store_true", help="only the numerics")
    parser.add_argument("--no-check", action="store_true", help="only the timings")
    parser.add_argument("--shard", default="0/1", help="run part I of N of the cases, as I/N")
    parser.add_argument("--tune", action="store_true", help="try configurations")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of --tune at most")
    parser.add_argument("--only", default="", help="cases or workloads whose name holds this")
    parser.add_argument("--backend", choices=("triton", "mosaic_gpu"), help="this one alone")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/h200.json")
    args = parser.parse_args(arguments)
    backends = {"triton": triton, "mosaic_gpu": mosaic_gpu}
    if args.backend:
        backends = {args.backend: backends[args.backend]}
    if args.tune:
        tune(args.only, args.seconds)
        return 0
    failures = 0
    if not args.no_check:
        index, count = args.shard.split("/")
        failures += check_cases(backends, args.only, (int(index), int(count)))
    if not args.check_only:
        failures += bench(backends, args.only, args.record)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
