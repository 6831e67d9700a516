"""python -m jaxllm.generate: one prompt, answered in the terminal as it is written."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from jaxllm.config import EngineConfig
from jaxllm.engine.errors import EngineError
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.serve.args import FlagParser, add_config_flags, add_flags, make_config
from jaxllm.serve.snapshot import write_snapshot

# Field of SamplingParams -> (type, default, help). Greedy by default: the same answer every time.
SAMPLING_FLAGS: dict[str, tuple[type, Any, str]] = {
    "max_tokens": (int, 512, "longest answer, in tokens"),
    "temperature": (float, 0.0, "0 is greedy"),
    "top_p": (float, 1.0, "sample from the likeliest tokens that sum to this"),
    "top_k": (int, 0, "sample from this many of the likeliest tokens; 0 is off"),
    "min_p": (float, 0.0, "drop tokens less likely than this share of the likeliest"),
    "repetition_penalty": (float, 1.0, "above 1: discourage tokens that were there before"),
    "presence_penalty": (float, 0.0, "subtracted from the logits of tokens already written"),
    "frequency_penalty": (float, 0.0, "the same, times how often they were written"),
    "min_tokens": (int, 0, "shortest answer, in tokens"),
}


@dataclass(slots=True)
class Timing:
    """When an answer was asked for, and when its first and last token came, in seconds."""

    asked: float
    first: float | None = None
    last: float | None = None

    def tokens_per_second(self, num_tokens: int) -> float:
        """The rate after the first token, or of the whole where there is no more than one."""
        if self.first is None or self.last is None:
            return 0.0
        if num_tokens < 2:
            return num_tokens / max(self.last - self.asked, 1e-9)
        return (num_tokens - 1) / max(self.last - self.first, 1e-9)


def make_parser() -> FlagParser:
    parser = FlagParser(
        prog="python -m jaxllm.generate",
        description="Answers one prompt; the text goes to stdout, all else to stderr.",
    )
    parser.add_argument("--prompt", help="the prompt; read from stdin when missing")
    parser.add_argument(
        "--chat", action="store_true", help="put the prompt through the model's chat template"
    )
    parser.add_argument("--system", help="system message, with --chat")
    parser.add_argument("--quiet", action="store_true", help="no progress and no timing on stderr")
    sampling = parser.add_argument_group("sampling")
    for name, (kind, default, text) in SAMPLING_FLAGS.items():
        flag = "--" + name.replace("_", "-")
        sampling.add_argument(flag, type=kind, default=default, help=f"{text} ({default})")
    sampling.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
    sampling.add_argument(
        "--ignore-eos", action="store_true", help="go on to --max-tokens, for measuring"
    )
    add_config_flags(parser)
    add_flags(parser.add_argument_group("engine"), EngineConfig)
    return parser


def read_prompt(args: argparse.Namespace, stdin: TextIO) -> str:
    """The prompt from --prompt, or all of stdin when that is a file or a pipe.

    Raises:
        ValueError: there is none, or --system was given without --chat.
    """
    if args.system is not None and not args.chat:
        raise ValueError("--system needs --chat: a plain prompt has no system message.")
    if args.prompt is None and stdin.isatty():
        raise ValueError("--prompt is missing; give it, or pipe the prompt in.")
    prompt = stdin.read() if args.prompt is None else args.prompt
    if not prompt:
        raise ValueError("the prompt is empty.")
    return prompt


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Raises ValueError naming the parameter that is out of range."""
    values = {name: getattr(args, name) for name in SAMPLING_FLAGS}
    return SamplingParams(stop=args.stop, ignore_eos=args.ignore_eos, **values)


def as_messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, {"role": "user", "content": prompt}]


def write_answer(
    outputs: Iterator[RequestOutput], timing: Timing, stdout: TextIO
) -> RequestOutput | None:
    """Writes the text as it grows; returns the last output. `outputs` holds the whole so far."""
    written, last = 0, None
    for last in outputs:
        timing.last = time.perf_counter()
        if timing.first is None:
            timing.first = timing.last
        text = last.outputs[0].text
        stdout.write(text[written:])
        stdout.flush()
        written = len(text)
    stdout.write("\n")
    stdout.flush()
    return last


def summary(output: RequestOutput, timing: Timing) -> str:
    """One line: how much was written, how fast, and why it ended if that was the limit."""
    count = len(output.outputs[0].token_ids)
    wait = (timing.first or timing.asked) - timing.asked
    line = (
        f"{count} tokens, {timing.tokens_per_second(count):.1f} tokens/s, "
        f"first token after {wait:.2f} s (prompt of {len(output.prompt_token_ids)} tokens)"
    )
    if output.outputs[0].finish_reason == "length":
        line += "; cut at --max-tokens or the end of the context"
    return line


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's settings; one prompt needs no room, and no compiled programs, for more."""
    config = make_config(EngineConfig, args)
    return config if "max_num_seqs" in args else config.replace(max_num_seqs=1)


def answer(args: argparse.Namespace, config: EngineConfig) -> None:
    """Loads the model, streams its answer to stdout and the timing to stderr."""
    prompt, params = read_prompt(args, sys.stdin), sampling_params(args)
    from jaxllm.llm import LLM  # after the cheap checks: it loads jax and transformers

    started = time.perf_counter()
    if not args.quiet:
        print(f"Loading {config.model} …", file=sys.stderr, flush=True)
    llm = LLM(**vars(config))
    if args.dump_config is not None:
        # The sampling flags below decide here, not the checkpoint's defaults.
        write_snapshot(args.dump_config, [llm.llm_engine.config], args.origins, {})
    if not args.quiet:
        print(f"Ready after {time.perf_counter() - started:.1f} s.\n", file=sys.stderr, flush=True)
    timing = Timing(asked=time.perf_counter())
    question = as_messages(prompt, args.system) if args.chat else prompt
    last = write_answer(llm.stream(question, params), timing, sys.stdout)
    if last is not None and last.error:
        raise EngineError(last.error)
    if last is not None and not args.quiet:
        print("\n" + summary(last, timing), file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 for what cannot be done (said in one line), 130 after Ctrl-C."""
    parser = make_parser()
    args = parser.parse(argv)
    try:
        answer(args, engine_config(args))
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has enough. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, EngineError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
