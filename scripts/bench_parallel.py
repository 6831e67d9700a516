"""Speed of one engine on several GPUs beside one: `python scripts/bench_parallel.py --record`.

Parts, each in a process of its own with a time limit, so that one that fails or hangs costs only
itself; every figure is printed, and recorded, as soon as it is known. With --devices 2 they are:
  tokens      greedy tokens of a small model in float32: tp=2 and pp=2 as tp=1
  allreduce   the time of one sum over the devices, for the rows of a decode step
  8b-tp1, 8b-tp2, 8b-pp2   start, TPOT, decode, prefill and 256 requests
  70b         at tp=2: start, TPOT, decode
Ratios are to tp=1 of the same run; efficiency is the speed-up over the number of devices. A decode
step's all-reduces are two a layer, of which `allreduce` (run before) gives one's time.
"""

import argparse
import faulthandler
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record
from bench_offline import SHAPES, WORKLOADS, PagedEngine, model_folder
from parallel_figures import ONE, Figures, Layout

READ = 4.19e12
"""Bytes a second that an H200 reads (measured, docs/scaling.md)."""
ROWS = {"TPOT, batch 1": 2, "decode step, batch 64": 64, "decode step, batch 256": 256}
"""Tokens in the program of a step; no program on a GPU has fewer than 2."""
STEPS = (("tpot", 1), ("decode", 64))
ALL = (*STEPS, ("decode", 256), ("prefill", 1), ("mixed256", 1))
"""(workload of bench_offline.py, batch)"""
SECONDS = {"tokens": 120, "allreduce": 60, "8b": 210, "70b": 240}
"""The limit of a part, by the beginning of its name."""
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


class BriefEngine(PagedEngine):
    """Cuts every workload to what a CPU does in seconds, for a rehearsal."""

    def run(self, prompts: list[list[int]], lengths: list[int]) -> float:
        return super().run([p[:24] for p in prompts[:16]], [min(n, 6) for n in lengths[:16]])


def failed(what: str, error: Exception) -> bool:
    """Says so; False, as what `what` then returns."""
    traceback.print_exc()
    line = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"FAILED {what}: {line[:300]}", flush=True)
    return False


def label(model: str) -> str:
    return Path(model).name.lower()


def shape_of(model: str) -> dict[str, Any]:
    """The config.json of a name in scripts/shapes, or of a folder."""
    shape = SHAPES / f"{model.lower()}.json"
    return json.loads((shape if shape.exists() else Path(model, "config.json")).read_text())


def sum_name(rows: int) -> str:
    return f"one all-reduce, {rows} rows"


def floor_ms(weights: int, layout: Layout, shape: dict[str, Any]) -> float:
    """What reading the weights takes, a stage after the other; of an embedding only rows are read.

    Args:
        weights: bytes on one device of each stage, in all.
    """
    if not shape.get("tie_word_embeddings"):
        weights -= shape["vocab_size"] * shape["hidden_size"] * 2 // layout.tp
    return 1e3 * weights / READ


def check_tokens(args: argparse.Namespace, figures: Figures) -> bool:
    """Whether greedy tokens are the same on every layout."""
    from jaxllm import LLM, SamplingParams

    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
    options |= {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 512}
    options |= {"skip_tokenizer_init": True, "enforce_eager": True}
    options |= json.loads(args.engine_args)
    rng = random.Random(0)
    prompts = [[rng.randrange(4096) for _ in range(5 + 7 * i)] for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    wanted: list[list[int]] = []
    good = True
    with tempfile.TemporaryDirectory() as folder:
        if not args.model_tokens:
            Path(folder, "config.json").write_text(json.dumps(TINY))
            options["load_format"] = "dummy"
        for layout in (ONE, Layout(tp=args.devices), Layout(pp=args.devices)):
            llm = LLM(args.model_tokens or folder, **options, **layout.options)
            outputs = llm.generate([*prompts], params, use_tqdm=False)
            found = [list(output.outputs[0].token_ids) for output in outputs]
            wanted = wanted or found
            same = sum(a == b for a, b in zip(found, wanted, strict=True))
            facts = {"dtype": "float32", "different_tokens": len({t for ids in found for t in ids})}
            name = label(args.model_tokens or "tiny")
            figures.add(name, "greedy tokens as tp=1", layout, same, f"of {len(found)}", **facts)
            good &= found == wanted
            del llm
            gc.collect()
    return good


def measure_sums(args: argparse.Namespace, figures: Figures) -> bool:
    """The time of one sum, as the difference of chains with and without sums."""
    from all_reduce import chain_seconds

    layout = Layout(tp=args.devices)
    for model in dict.fromkeys((args.model_8b, args.model_70b)):
        hidden = shape_of(model)["hidden_size"]
        for rows in ROWS.values():
            shape, repeats = (rows, hidden), args.repeats
            summed, alone = (chain_seconds(args.devices, shape, s, repeats) for s in (True, False))
            value, facts = 1e6 * max(0.0, summed - alone), {"with_product": round(1e6 * summed, 3)}
            figures.add(label(model), sum_name(rows), layout, value, "us", **facts)
    return True


@dataclass(frozen=True, slots=True)
class EnginePart:
    """One engine and what it is measured with."""

    model: str
    layout: Layout
    workloads: Sequence[tuple[str, int]]
    max_num_seqs: int
    max_num_batched_tokens: int

    def __call__(self, args: argparse.Namespace, figures: Figures) -> bool:
        import jaxllm

        options: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16"}
        options |= {"skip_tokenizer_init": True, "max_model_len": 4096}
        options["max_num_seqs"] = self.max_num_seqs
        options["max_num_batched_tokens"] = self.max_num_batched_tokens
        if args.quick:
            options |= {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 512}
            options["num_gpu_blocks_override"] = 512
        options |= json.loads(args.engine_args) | self.layout.options
        with tempfile.TemporaryDirectory() as stack:
            kind = BriefEngine if args.quick else PagedEngine
            engine = kind(jaxllm, model_folder(self.model, Path(stack)), options)
        name, inner = label(self.model), engine.llm.llm_engine.engine
        figures.add(name, "start", self.layout, engine.start_seconds, "s")
        for phase in ("load the weights", "compile, allocate and warm up"):
            figures.add(name, f"start: {phase}", self.layout, inner.phases[phase], "s")
        weights = sum(plan.holders.weights for plan in inner.stage_memory)
        floor = {"floor_ms": round(floor_ms(weights, self.layout, shape_of(self.model)), 3)}
        good = True
        for workload, batch in self.workloads:
            # A second run of the same requests would find their prompts in the cache.
            repeats = 1 if workload == "mixed256" else args.repeats
            try:
                results = WORKLOADS[workload](engine, batch, repeats)
            except Exception as error:
                good = failed(f"{name} {self.layout}: {workload}, batch {batch}", error)
                continue
            for figure, value, unit in results:
                facts = floor if figure == "TPOT, batch 1" else {}
                figures.add(name, figure, self.layout, value, unit, **facts)
                self._add_share(figures, figure, value)
        return good

    def _add_share(self, figures: Figures, figure: str, step_ms: float) -> None:
        """What part of a decode step its sums take."""
        rows, name = ROWS.get(figure), label(self.model)
        one = figures.find(name, sum_name(rows), self.layout) if rows else None
        if one is not None and step_ms > 0:
            share = 100 * 2 * shape_of(self.model)["num_hidden_layers"] * one / 1e3 / step_ms
            figures.add(name, f"{figure}: all-reduces", self.layout, share, "%")


Part = Callable[[argparse.Namespace, Figures], bool]


def make_parts(args: argparse.Namespace) -> dict[str, Part]:
    """Every part by its name; the order is that of a whole run."""
    n, eight = args.devices, args.model_8b
    return {
        "tokens": check_tokens,
        "allreduce": measure_sums,
        "8b-tp1": EnginePart(eight, ONE, ALL, 256, 16384),
        f"8b-tp{n}": EnginePart(eight, Layout(tp=n), ALL, 256, 16384),
        f"8b-pp{n}": EnginePart(eight, Layout(pp=n), ALL, 256, 16384),
        "70b": EnginePart(args.model_70b, Layout(tp=n), STEPS, 64, 4096),
    }


def run_apart(argv: Sequence[str], name: str, figures: Path, seconds: float) -> bool:
    """Runs a part in a process of its own; whether it went well within `seconds`."""
    start = time.perf_counter()
    print(f"--- {name}, at most {seconds:.0f} s", flush=True)
    command = [sys.executable, __file__, *argv, "--part", name, "--figures", str(figures)]
    command += ["--stacks-after", str(max(1.0, seconds - 5))]
    try:
        code = subprocess.run(command, timeout=seconds, check=False).returncode
        outcome = f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        outcome = f"stopped after {seconds:.0f} s"
    if outcome:
        print(f"FAILED {name}: {outcome}", flush=True)
    print(f"--- {name} took {time.perf_counter() - start:.0f} s", flush=True)
    return not outcome


def make_parser() -> argparse.ArgumentParser:
    """The flags; the last two are for a part's own process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--devices", type=int, default=2, help="the size of tp and of pp")
    parser.add_argument("--parts", help="comma-separated, in this order; default: all")
    parser.add_argument("--model-8b", default="llama-3.1-8b", help="scripts/shapes, or a folder")
    parser.add_argument("--model-70b", default="llama-3.1-70b", help="scripts/shapes, or a folder")
    parser.add_argument("--model-tokens", help="a checkpoint for tokens; default: a random model")
    parser.add_argument("--repeats", type=int, default=3, help="of which the median counts")
    parser.add_argument("--seconds", type=float, default=570, help="for all parts together")
    parser.add_argument("--engine-args", default="{}", help="JSON of further engine arguments")
    parser.add_argument("--quick", action="store_true", help="a rehearsal: figures mean nothing")
    parser.add_argument(
        "--record", type=Path, nargs="?", const=record.FILE, help="append to benchmarks/h200.json"
    )
    parser.add_argument(
        "--figures", type=Path, help="kept here, so that a later call finds those of tp=1"
    )
    for flag, kind in (("--part", str), ("--stacks-after", float)):
        parser.add_argument(flag, type=kind, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    parts = make_parts(args)
    if args.part:
        faulthandler.dump_traceback_later(args.stacks_after)
        try:
            good = parts[args.part](args, Figures(args.figures, args.record))
        except Exception as error:
            good = failed(args.part, error)
        return 0 if good else 1
    names = args.parts.split(",") if args.parts else list(parts)
    if unknown := [name for name in names if name not in parts]:
        parser.error(f"no part {unknown[0]!r}: take of {','.join(parts)}")
    if args.quick and args.record == record.FILE:
        parser.error("--quick gives no figures to record: name another file")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # as jaxllm/engine/startup.py
    end, good = time.perf_counter() + args.seconds, True
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            limit = next(s for start, s in SECONDS.items() if name.startswith(start))
            left = min(limit, end - time.perf_counter())
            if left < 10:
                print(f"FAILED {name}: no time is left of --seconds {args.seconds}", flush=True)
                good = False
                continue
            figures = args.figures or Path(folder, "figures.json")
            good &= run_apart(argv, name, figures, left)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
