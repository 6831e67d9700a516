"""`python -m jaxllm.plan MODEL`: what would fit, from config.json alone, before anything is read.

No weights are read and no GPU is touched. Exit code 0: it fits; 1: it does not, and the last lines
name single changes that would; 2: a bad flag.
"""

import argparse
import gc
import logging
import os
import re
import sys
from collections.abc import Sequence

from jaxllm.config import EngineConfig
from jaxllm.serve.args import FlagParser, add_flags, make_config

DEFAULT_MEMORY = 80 * 2**30
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def memory_size(text: str) -> int:
    """80GiB, 80GB, 80G (of 10**9 bytes), or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None or (match[3] and not match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 80GiB or 80GB")
    unit = match[2].upper()
    return int(float(match[1]) * (_BINARY_UNITS if match[3] else _UNITS)[unit])


def make_parser() -> FlagParser:
    parser = FlagParser(prog="python -m jaxllm.plan", description=__doc__)
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="same as --model")
    devices = parser.add_argument_group("devices")
    devices.add_argument(
        "--gpu-memory",
        type=memory_size,
        default=DEFAULT_MEMORY,
        metavar="SIZE",
        help="memory of a device, such as 80GiB (the default)",
    )
    add_flags(parser.add_argument_group("engine"), EngineConfig)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = make_parser()
    args = parser.parse(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    if args.positional_model is not None:
        args.model = args.positional_model
    try:
        config = make_config(EngineConfig, args)
    except ValueError as error:
        parser.error(str(error))
    # Imported here: flags are answered, and garbage collection is off, before the rest is loaded.
    import jax

    from jaxllm.engine.fit import changes_that_fit, make_request, report
    from jaxllm.runner.estimate import Parallel

    jax.config.update("jax_platforms", "cpu")  # a GPU is not even looked for
    try:
        parallel = Parallel(config.tensor_parallel_size, config.pipeline_parallel_size)
        request = make_request(config, args.gpu_memory, parallel)
        print("\n".join(report(request)))
        problem = request.problem()
        if not problem:
            print("It fits.")
            return 0
        print(f"It does not fit. {problem}")
        changes = list(changes_that_fit(request))
        print("Any one of these would fit:" if changes else "No single flag makes it fit.")
        for change in changes:
            print(f"  {change}")
    except BrokenPipeError:
        # The reader has enough. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    gc.disable()  # a short life that makes no garbage
    sys.exit(main())
