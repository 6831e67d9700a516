"""Compares jaxllm with transformers on the same prompts, layer by layer and token by token.

    python scripts/compare_with_torch.py MODEL [--dtype float32] [--layers] [--json FILE]

The logits come from the engine's own parts: chunked prefill through the paged cache for the
prompt, single-token decode steps for what follows, fed with transformers' greedy tokens. Those
greedy tokens are then compared with what the whole engine generates. Exit code 1 when a limit
(--atol, --max-kl, --greedy) is broken.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from paged_forward import PagedForward

from jaxllm import EngineConfig, SamplingParams
from jaxllm.converters.checkpoint import locate
from jaxllm.engine.local_engine import LocalEngine

LONG = "The quick brown fox jumps over the lazy dog; then it rests beside the old stone bridge. "
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "人工智能正在改变世界,因为它",
    "🙂🚀👩‍👩‍👧 emoji are",
    "1 + 1 = 2, 2 + 2 = 4, 3 + 3 =",
    "<html>\n  <body>\n    <h1>Hello</h1>\n",
    "Übergrößenträger and naïve café: ďábel",
    "a",
    LONG,
    "Once upon a time, in a village by the sea, there lived a clockmaker who",
]
LONG_TOKENS = 1500
POSITIONS_AT_ONCE = 256


class Torch:
    """The reference: transformers with eager attention."""

    def __init__(self, model: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        path = locate(model)
        if path.is_dir() and not (path / "config.json").exists():
            path = next(path.glob("*.gguf"))
        where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            str(path.parent if where else path),
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            **where,
        ).eval()

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """`count` argmax tokens, eos or not."""
        torch, tokens, cache = self.torch, torch_ids(self.torch, ids), None
        made: list[int] = []
        with torch.inference_mode():
            for _ in range(count):
                out = self.model(tokens, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                made.append(int(out.logits[0, -1].argmax()))
                tokens = torch_ids(torch, made[-1:])
        return made

    def forward(self, ids: list[int], hidden: bool) -> tuple[np.ndarray, list[np.ndarray]]:
        """Logits [T, V], and with `hidden` the input of each layer and the final states [T, D]."""
        with self.torch.inference_mode():
            out = self.model(torch_ids(self.torch, ids), output_hidden_states=hidden)
        states = [s[0].float().numpy() for s in out.hidden_states or ()]
        return out.logits[0].float().numpy(), states


def torch_ids(torch: Any, ids: list[int]) -> Any:
    return torch.tensor([ids], dtype=torch.long)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def compare_logits(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """Errors over rows of logits [n, V]; KL is KL(theirs || ours), in nats."""
    worst = {"max_abs": 0.0, "max_rel": 0.0, "max_kl": 0.0}
    top1 = top5 = 0.0
    for start in range(0, len(ours), POSITIONS_AT_ONCE):
        a, b = ours[start:][:POSITIONS_AT_ONCE], theirs[start:][:POSITIONS_AT_ONCE]
        error = np.abs(a - b)
        p, q = log_softmax(b), log_softmax(a)
        worst["max_abs"] = max(worst["max_abs"], float(error.max()))
        worst["max_rel"] = max(worst["max_rel"], float((error.max(-1) / np.abs(b).max(-1)).max()))
        worst["max_kl"] = max(worst["max_kl"], float((np.exp(p) * (p - q)).sum(-1).max()))
        best = [np.argpartition(-x, 4, axis=-1)[:, :5] for x in (a, b)]
        top1 += float((a.argmax(-1) == b.argmax(-1)).sum())
        top5 += sum(len(set(x) & set(y)) / 5 for x, y in zip(*best, strict=True))
    return worst | {"top1": top1 / len(ours), "top5": top5 / len(ours)}


def compare_layers(ours: list[np.ndarray], theirs: list[np.ndarray]) -> list[dict[str, Any]]:
    """Errors of the hidden states: the embedding, each layer, the final norm."""
    names = ["embedding", *(f"layer {i}" for i in range(len(ours) - 2)), "final norm"]
    # transformers gives no state of the last layer before the norm: compare what both have.
    rows = []
    for name, a, b in zip(names, [*ours[:-2], ours[-1]], theirs, strict=False):
        error = float(np.abs(a - b).max())
        rows.append({"name": name, "max_abs": error, "max_rel": error / float(np.abs(b).max())})
    rows[-1]["name"] = "final norm"
    return rows


def prompt_ids(
    engine: LocalEngine, file: str | None, limit: int, vocab_size: int
) -> list[list[int]]:
    """Token ids of the prompts; random ids for a model without a tokenizer."""
    if engine.tokenizer is None:
        rng = np.random.default_rng(0)
        lengths = [1, 2, 7, 16, 17, 33, 64, min(150, limit)]
        return [rng.integers(0, vocab_size, min(n, limit)).tolist() for n in lengths]
    texts = PROMPTS if file is None else Path(file).read_text().splitlines()
    ids = []
    for text in filter(None, texts):
        tokens = engine.tokenizer.encode(text)
        if text == LONG:
            tokens = (tokens * (LONG_TOKENS // len(tokens) + 1))[:LONG_TOKENS]
        ids.append(tokens[:limit])
    return ids


def run_prompt(
    ids: list[int],
    engine: LocalEngine,
    forward: PagedForward,
    torch: Torch,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """All figures of one prompt."""
    greedy = torch.greedy(ids, args.num_tokens)
    theirs, their_states = torch.forward(ids + greedy[:-1], args.layers)
    prefill = forward.prefill(ids)
    decode = np.concatenate([prefill[-1:], *[forward.decode(t) for t in greedy[:-1]]])
    report: dict[str, Any] = {
        "tokens": len(ids),
        "prefill": compare_logits(prefill, theirs[: len(ids)]),
        "decode": compare_logits(decode, theirs[len(ids) - 1 :]),
    }
    params = SamplingParams(
        temperature=0, max_tokens=args.num_tokens, ignore_eos=True, detokenize=False
    )
    engine.add_request("compare", ids, params)
    made: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            made = output.outputs[0].token_ids
    report["greedy"] = sum(a == b for a, b in zip(made, greedy, strict=True)) / len(greedy)
    if args.layers:
        report["layers"] = compare_layers(
            forward.hidden_states(ids), [state[: len(ids)] for state in their_states]
        )
    return report


def check(reports: list[dict[str, Any]], args: argparse.Namespace) -> list[str]:
    """The limits that are broken, in words."""
    broken = []
    for number, report in enumerate(reports):
        for path in ("prefill", "decode"):
            for key, limit in (("max_abs", args.atol), ("max_kl", args.max_kl)):
                if not report[path][key] <= limit:
                    value = report[path][key]
                    broken.append(f"prompt {number}, {path}: {key} {value:.3g} > {limit:g}")
        if report["greedy"] < args.greedy:
            broken.append(
                f"prompt {number}: greedy agreement {report['greedy']:.2f} < {args.greedy}"
            )
    return broken


def show(number: int, report: dict[str, Any]) -> None:
    for path in ("prefill", "decode"):
        r = report[path]
        print(
            f"prompt {number:2} ({report['tokens']:4} tokens) {path:8}"
            f" max|d| {r['max_abs']:.2e}  rel {r['max_rel']:.2e}  KL {r['max_kl']:.2e}"
            f"  top-1 {r['top1']:.3f}  top-5 {r['top5']:.3f}"
        )
    print(f"prompt {number:2} greedy agreement {report['greedy']:.3f}", flush=True)
    for row in report.get("layers", ()):
        print(f"    {row['name']:<12} max|d| {row['max_abs']:.2e}  rel {row['max_rel']:.2e}")


def main() -> int:
    parser = argparse.ArgumentParser(description="compares jaxllm with transformers")
    parser.add_argument("model", help="folder, .gguf file, hub id or 'demo'")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", help="file with a prompt a line")
    parser.add_argument("--num-tokens", type=int, default=64, help="greedy tokens a prompt")
    parser.add_argument("--chunk", type=int, default=256, help="tokens a prefill step")
    parser.add_argument("--layers", action="store_true", help="compare the hidden states too")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--atol", type=float, default=5e-3, help="largest |d logit| allowed")
    parser.add_argument("--max-kl", type=float, default=1e-6, help="largest KL allowed, in nats")
    parser.add_argument("--greedy", type=float, default=1.0, help="least share of equal tokens")
    args = parser.parse_args()

    torch = Torch(args.model, args.dtype)
    has_tokenizer = any(
        (Path(args.model) / name).exists() for name in ("tokenizer.json", "tokenizer.model")
    )
    has_tokenizer |= not Path(args.model).is_dir()
    engine = LocalEngine(
        EngineConfig(
            model=args.model,
            dtype=args.dtype,
            enforce_eager=True,
            max_num_seqs=1,
            max_num_batched_tokens=args.chunk,
            skip_tokenizer_init=not has_tokenizer,
        )
    )
    forward = PagedForward(engine.engine.runner, engine.config)
    limit = forward.max_tokens - args.num_tokens - 1
    reports = []
    for number, ids in enumerate(prompt_ids(engine, args.prompts, limit, engine.engine.vocab_size)):
        reports.append(run_prompt(ids, engine, forward, torch, args))
        show(number, reports[-1])
    broken = check(reports, args)
    if args.json:
        Path(args.json).write_text(json.dumps({"prompts": reports, "broken": broken}, indent=1))
    print(*(broken or [f"{args.model}: all {len(reports)} prompts agree"]), sep="\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
