"""Offline speed of an engine: `python scripts/bench_offline.py --model M --workload W`.

Engines: jaxllm, transformers (one stream at a time), vllm where it is installed. Several engines
in one run are measured side by side. Random token ids, greedy, eos ignored.

Workloads:
  streams   one stream, then 16 at once (tokens/s)          tpot      time per output token, batch 1
  decode    step time at --batch requests of ~1k context    prefill   64 prompts of 2048 tokens
  mixed256  256 requests, in/out U(100, 1024)               seed      1000 requests, 200 in, 150 out
  prefix    seed behind 800 shared tokens                   closed    --batch clients, 200/150 each
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import record

SHAPES = Path(__file__).parent / "shapes"
Prompts = list[list[int]]
Result = list[tuple[str, float, str]]
"""(figure, value, unit)"""


class PagedEngine:
    """jaxllm or vLLM: both have the same `LLM` and `SamplingParams`."""

    def __init__(self, module: Any, model: str, options: dict[str, Any]) -> None:
        self.module = module
        start = time.perf_counter()
        self.llm = module.LLM(model, **options)
        self.start_seconds = time.perf_counter() - start

    def _params(self, max_tokens: int) -> Any:
        return self.module.SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=max_tokens, detokenize=False
        )

    def run(self, prompts: Prompts, lengths: list[int]) -> float:
        """Seconds until all are done."""
        start = time.perf_counter()
        outputs = self.llm.generate(
            [{"prompt_token_ids": p} for p in prompts],
            [self._params(n) for n in lengths],
            use_tqdm=False,
        )
        seconds = time.perf_counter() - start
        made = [len(o.outputs[0].token_ids) for o in outputs]
        assert made == lengths, "the engine made another number of tokens than asked"
        return seconds

    def closed_loop(self, prompts: Prompts, length: int, clients: int) -> tuple[float, list[float]]:
        """Seconds in all, and each request's latency, with `clients` requests always running."""
        engine, waiting = self.llm.llm_engine, list(enumerate(prompts))
        started: dict[str, float] = {}
        latencies: list[float] = []

        def send() -> None:
            number, prompt = waiting.pop()
            started[str(number)] = time.perf_counter()
            engine.add_request(str(number), {"prompt_token_ids": prompt}, self._params(length))

        start = time.perf_counter()
        for _ in range(clients):
            send()
        while started:
            for output in engine.step():
                if output.finished:
                    latencies.append(time.perf_counter() - started.pop(output.request_id))
                    if waiting:
                        send()
        return time.perf_counter() - start, latencies


class TransformersEngine:
    """transformers' own generate on the CPU: one request after the other."""

    def __init__(self, model: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        start = time.perf_counter()
        path = Path(model)
        where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        folder = str(path.parent) if where else model
        self.torch = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), **where
        ).eval()
        self.start_seconds = time.perf_counter() - start

    def run(self, prompts: Prompts, lengths: list[int]) -> float:
        start = time.perf_counter()
        for prompt, length in zip(prompts, lengths, strict=True):
            ids = self.torch.tensor([prompt])
            with self.torch.inference_mode():
                out = self.model.generate(
                    ids,
                    attention_mask=self.torch.ones_like(ids),
                    max_new_tokens=length,
                    min_new_tokens=length,
                    do_sample=False,
                    pad_token_id=0,
                )
            assert out.shape[1] == len(prompt) + length
        return time.perf_counter() - start


def random_prompts(count: int, length: int | Callable[[], int], seed: int = 0) -> Prompts:
    """`count` prompts of ids in 1000 … 30000; `length` may draw each one's."""
    rng = random.Random(seed)
    size = length if callable(length) else lambda: length
    return [[rng.randint(1000, 30000) for _ in range(size())] for _ in range(count)]


def difference(engine: Any, prompts: Prompts, few: int, many: int, repeats: int) -> float:
    """Seconds a step: what more tokens cost, so prefill and start drop out; the median of runs."""
    times = []
    for _ in range(repeats):
        short = engine.run(prompts, [few] * len(prompts))
        times.append((engine.run(prompts, [many] * len(prompts)) - short) / (many - few))
    return sorted(times)[repeats // 2]


def streams(engine: Any, batch: int, repeats: int) -> Result:
    """One stream of 128 tokens; 16 streams at once (for transformers: one only)."""
    engine.run(random_prompts(1, 32), [8])
    one = 128 / min(engine.run(random_prompts(1, 32, i), [128]) for i in range(repeats))
    result: Result = [("one stream", one, "tok/s")]
    if isinstance(engine, PagedEngine):
        many = min(engine.run(random_prompts(16, 32, i), [128] * 16) for i in range(repeats))
        result.append(("16 streams", 16 * 128 / many, "tok/s"))
    return result


def tpot(engine: Any, batch: int, repeats: int) -> Result:
    prompts = random_prompts(1, 128)
    engine.run(prompts, [4])
    first = sorted(engine.run(random_prompts(1, 128, i), [1]) for i in range(1, 6))[2]
    value = 1e3 * difference(engine, prompts, 1, 257, repeats)
    return [("TPOT, batch 1", value, "ms"), ("TTFT, 128 tokens", 1e3 * first, "ms")]


def decode(engine: Any, batch: int, repeats: int) -> Result:
    prompts = random_prompts(batch, 1000)
    engine.run(prompts, [2] * batch)
    return [
        (f"decode step, batch {batch}", 1e3 * difference(engine, prompts, 1, 129, repeats), "ms")
    ]


def prefill(engine: Any, batch: int, repeats: int) -> Result:
    engine.run(random_prompts(4, 2048, 99), [1] * 4)
    seconds = [engine.run(random_prompts(64, 2048, i), [1] * 64) for i in range(repeats)]
    return [("prefill 64x2048", 64 * 2048 / sorted(seconds)[repeats // 2], "tok/s")]


def mixed256(engine: Any, batch: int, repeats: int) -> Result:
    rng = random.Random(0)
    sizes = [rng.randint(100, 1024) for _ in range(256)]
    lengths = [rng.randint(100, 1024) for _ in range(256)]
    engine.run(random_prompts(8, 200, 7), [8] * 8)
    # Other prompts each time, or the prefix cache would have them.
    seconds = [
        engine.run(random_prompts(256, iter(sizes).__next__, 100 + i), lengths)
        for i in range(repeats)
    ]
    return [
        ("256 requests U(100,1024)", sum(lengths) / sorted(seconds)[repeats // 2], "output tok/s")
    ]


def seed(engine: Any, batch: int, repeats: int, shared: int = 0) -> Result:
    prefix = random_prompts(1, shared, 5)[0] if shared else []
    prompts = [prefix + p for p in random_prompts(1000, 200)]
    engine.run([prefix + p for p in random_prompts(8, 200, 7)], [8] * 8)
    name = f"200/150 x1000, {shared} shared" if shared else "200/150 x1000"
    return [(name, 1000 / engine.run(prompts, [150] * 1000), "req/s")]


def prefix(engine: Any, batch: int, repeats: int) -> Result:
    return seed(engine, batch, repeats, shared=800)


def closed(engine: Any, batch: int, repeats: int) -> Result:
    engine.run(random_prompts(8, 200, 7), [8] * 8)
    count = max(10 * batch, 200)
    seconds, latencies = engine.closed_loop(random_prompts(count, 200), 150, batch)
    latencies.sort()
    name = f"closed loop {batch}"
    return [
        (name, count / seconds, "req/s"),
        (f"{name}, p50", latencies[len(latencies) // 2], "s"),
        (f"{name}, p95", latencies[int(len(latencies) * 0.95)], "s"),
    ]


WORKLOADS = {
    f.__name__: f for f in (streams, tpot, decode, prefill, mixed256, seed, prefix, closed)
}


def model_folder(name: str, stack: Path) -> str:
    """A folder with config.json alone for a shape by name; anything else stands for itself."""
    shape = SHAPES / f"{name.lower()}.json"
    if not shape.exists():
        return name
    folder = stack / name.lower()
    folder.mkdir()
    (folder / "config.json").write_text(shape.read_text())
    return str(folder)


def make_engine(name: str, model: str, args: argparse.Namespace) -> Any:
    if name == "transformers":
        from jaxllm.converters.checkpoint import demo_path

        return TransformersEngine(str(demo_path()) if model == "demo" else model, args.dtype)
    options: dict[str, Any] = json.loads(args.engine_args)
    options |= {"dtype": args.dtype, "load_format": args.load_format}
    options |= {"skip_tokenizer_init": True}
    if args.max_model_len:
        options["max_model_len"] = args.max_model_len
    if name == "vllm":
        import vllm  # pyright: ignore[reportMissingImports]

        return PagedEngine(vllm, model, options)
    import jaxllm

    return PagedEngine(jaxllm, model, options)


def caches() -> str:
    """Whether jaxllm's compilation cache, at its default place, has anything in it."""
    folder = Path.home() / ".cache" / "jaxllm" / "compilation"
    return "warm" if folder.is_dir() and any(folder.iterdir()) else "cold"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="demo", help="a model, or a name in scripts/shapes")
    parser.add_argument(
        "--engine", default="jaxllm", help="comma-separated: jaxllm,transformers,vllm"
    )
    parser.add_argument(
        "--workload", default="streams", help=f"comma-separated: {','.join(WORKLOADS)}"
    )
    parser.add_argument("--batch", default="64", help="comma-separated, for decode and closed")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine-args", default="{}", help="JSON of further engine arguments")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/h200.json")
    args = parser.parse_args()
    if "transformers" in args.engine and args.dtype == "auto":
        args.dtype = "float32"

    rows: list[tuple[str, str, float, str]] = []
    with tempfile.TemporaryDirectory() as stack:
        model = model_folder(args.model, Path(stack))
        for name in args.engine.split(","):
            start = f"start, {caches()} caches" if name == "jaxllm" else "start"
            engine = make_engine(name, model, args)
            rows.append((name, start, engine.start_seconds, "s"))
            for workload in args.workload.split(","):
                batches = args.batch.split(",") if workload in ("decode", "closed") else ["1"]
                for batch in batches:
                    found = WORKLOADS[workload](engine, int(batch), args.repeats)
                    rows += [(name, *figure) for figure in found]
                    print(*rows[-len(found) :], sep="\n", file=sys.stderr, flush=True)
            del engine
    print(f"\n{args.model}, {args.dtype}")
    for name, figure, value, unit in rows:
        print(f"  {name:<13} {figure:<28} {value:12.3f} {unit}")
    print_ratios(rows)
    if args.record:
        for name, figure, value, unit in rows:
            facts = {"engine": name, "dtype": args.dtype, "max_model_len": args.max_model_len}
            record(f"{args.model}: {figure}", value, unit, **facts)


def print_ratios(rows: list[tuple[str, str, float, str]]) -> None:
    """How many times one transformers stream each throughput is."""
    base = [v for name, figure, v, _ in rows if (name, figure) == ("transformers", "one stream")]
    for name, figure, value, unit in rows if base else []:
        if unit == "tok/s":
            print(f"  {name} {figure}: {value / base[0]:.2f} x one transformers stream")


if __name__ == "__main__":
    main()
