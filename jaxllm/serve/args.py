"""Command line flags, made from the fields of the config classes."""

import argparse
import dataclasses
import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from jaxllm.config import EngineConfig
from jaxllm.serve.options import ServeConfig
from jaxllm.serve.snapshot import Origin, read_config_file

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}

# Flags of older vLLM scripts: how many values they take, and what became of them.
IGNORED_FLAGS = {
    "--disable-async-output-proc": (0, "output is always processed beside the steps"),
    "--disable-frontend-multiprocessing": (0, "the engine always has its own process"),
    "--disable-log-requests": (0, "requests are not logged"),
    "--disable-log-stats": (0, "statistics are at /metrics only"),
    "--enable-chunked-prefill": (0, "prefill is always chunked"),
    "--max-seq-len-to-capture": (1, "there are no CUDA graphs"),
    "--num-lookahead-slots": (1, "there is no such setting"),
    "--preemption-mode": (1, "preempted requests are recomputed"),
    "--swap-space": (1, "preempted requests are recomputed, not swapped"),
    "--use-v2-block-manager": (0, "there is one block pool only"),
}


def human_int(text: str) -> int:
    """A whole number; 8k is 8000 and 8K is 8192, likewise m, M, g, G."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    value = float(match[1]) * _UNITS.get(match[2], 1) if match else 0.5
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 8192, 8k or 8K")
    return int(value)


class _Ignored(argparse.Action):
    """Notes that a flag without a meaning was given; the caller logs it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        namespace.ignored = [*(getattr(namespace, "ignored", None) or []), option_string]


class FlagParser(argparse.ArgumentParser):
    """Accepts --a_b for --a-b, and names the nearest flag for one that it does not know."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self._where = ""

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """The flags given, then those of --config; `origins` tells which came from where."""
        arguments = [_dashes(a) for a in (sys.argv[1:] if argv is None else argv)]
        namespace, unknown = self.parse_known_args(arguments)
        if unknown:
            self._refuse(unknown[0])
        given = set(vars(namespace))
        if getattr(namespace, "positional_model", None) is not None:
            given.add("model")
        namespace.origins = dict.fromkeys(given, "flag")
        if getattr(namespace, "config", None) is not None:
            for name, value in self._read_file(namespace.config).items():
                if name not in given:
                    setattr(namespace, name, value)
                    namespace.origins[name] = "file"
        return namespace

    def parse_settings(self, settings: Mapping[str, Any]) -> argparse.Namespace:
        """Settings by name as the flags would be; what is None counts as not given."""
        arguments: list[str] = []
        for name, value in settings.items():
            flag = "--" + name.replace("_", "-")
            action = self._option_string_actions.get(flag)
            if action is None:
                self._refuse(flag)
            elif value is not None:
                arguments += self._as_arguments(flag, action, value)
        return self.parse(arguments)

    def error(self, message: str) -> NoReturn:
        super().error(self._where + message)

    def _read_file(self, path: str) -> dict[str, Any]:
        """The settings of a config file, read as the flags of the same names would be.

        Those of the server mean nothing to other programs and are left out there.
        """
        try:
            settings = read_config_file(path)
        except ValueError as error:
            self.error(str(error))
        self._where = f"--config {path}: "
        arguments: list[str] = []
        for name, value in settings.items():
            flag = "--" + name.replace("_", "-")
            action = self._option_string_actions.get(flag)
            if action is not None:
                arguments += self._as_arguments(flag, action, value)
        namespace = self.parse_known_args(arguments)[0]
        self._where = ""
        return {name: getattr(namespace, name) for name in settings if name in namespace}

    def _as_arguments(self, flag: str, action: argparse.Action, value: Any) -> list[str]:
        if isinstance(action, argparse.BooleanOptionalAction):
            value = {"true": True, "false": False}.get(value, value)
            if not isinstance(value, bool):
                self.error(f"{flag[2:]} must be true or false, got {value!r}")
            return [flag if value else "--no-" + flag[2:]]
        if isinstance(value, dict) or (isinstance(value, list) and not _takes_several(action)):
            self.error(f"{flag[2:]} takes one value, got {value!r}")
        return [f"{flag}={item}" for item in (value if isinstance(value, list) else [value])]

    def _refuse(self, argument: str) -> NoReturn:
        if not argument.startswith("-"):
            self.error(f"unexpected argument {argument!r}")
        flag = argument.partition("=")[0]
        known = [o for o in self._option_string_actions if o not in IGNORED_FLAGS]
        near = difflib.get_close_matches(flag, known, n=3, cutoff=0.6)
        self.error(f"unknown flag {flag}" + (f"; did you mean {', '.join(near)}?" if near else ""))


def _dashes(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _takes_several(action: argparse.Action) -> bool:
    return action.nargs == "+" or type(action).__name__ == "_AppendAction"


def add_config_flags(parser: argparse._ActionsContainer) -> None:
    """The flags that read settings from a file and write the effective ones."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; flags win over it")
    parser.add_argument(
        "--dump-config",
        metavar="FILE",
        help="write every effective setting, with where it comes from, for --config",
    )


def add_flags(parser: argparse._ActionsContainer, config: type) -> None:
    """A flag for each field of a config dataclass; a field named model is positional as well."""
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):
        help_text = field.metadata["help"].replace("%", "%%")
        if field.default not in (None, False, ""):
            help_text += f" (default: {field.default})"
        kwargs = {"default": argparse.SUPPRESS, "help": help_text, "dest": field.name}
        kwargs |= _kwargs(field.name, hints[field.name])
        names = ["--" + field.name.replace("_", "-"), field.metadata.get("short")]
        parser.add_argument(*filter(None, names), **kwargs)


def _kwargs(name: str, hint: Any) -> dict[str, Any]:
    """How argparse is to read a field of this type."""
    if get_origin(hint) in (Union, UnionType):
        hint = next(t for t in get_args(hint) if t is not NoneType)
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is tuple:
        several = name == "served_model_name"
        extend = {"action": "extend", "nargs": "+", "metavar": "NAME"}
        return extend if several else {"action": "append", "metavar": "VALUE"}
    metavar = {int: "N", float: "X", str: "TEXT"}[hint]
    return {"type": human_int if hint is int else hint, "metavar": metavar}


def make_config[C](config: type[C], namespace: argparse.Namespace) -> C:
    """The config that the flags describe; fields not given keep their defaults.

    Raises:
        ValueError: a value is out of range; the message names the flag.
    """
    names = {field.name for field in dataclasses.fields(config)}  # pyright: ignore
    given = {k: v for k, v in vars(namespace).items() if k in names}
    return config(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})


def make_parser(kind: type[FlagParser] = FlagParser) -> FlagParser:
    parser = kind(
        prog="python -m jaxllm.serve",
        usage="python -m jaxllm.serve [MODEL] [flags]   (--help lists the flags)",
        description="Serves a model over an OpenAI-compatible HTTP API.",
    )
    parser.add_argument(
        "positional_model", nargs="?", metavar="MODEL", help="same as --model (default: demo)"
    )
    add_config_flags(parser)
    add_flags(parser.add_argument_group("server"), ServeConfig)
    add_flags(parser.add_argument_group("engine"), EngineConfig)
    for flag, (count, _) in IGNORED_FLAGS.items():
        parser.add_argument(
            flag, action=_Ignored, nargs=count, dest="ignored", help=argparse.SUPPRESS
        )
    return parser


@dataclass(frozen=True)
class Command:
    """A command line, read.

    Attributes:
        warnings: to be logged.
        origins: of the settings that are not defaults: "file" or "flag".
        dump_config: where to write the effective settings, if anywhere.
    """

    engine: EngineConfig
    serve: ServeConfig
    warnings: list[str]
    origins: dict[str, Origin]
    dump_config: str | None


def parse_args(argv: Sequence[str] | None = None) -> Command:
    """The server's command line; leaves with exit code 2 for a bad flag."""
    parser = make_parser()
    return as_command(parser, parser.parse(argv))


def as_command(parser: FlagParser, namespace: argparse.Namespace) -> Command:
    """What `parser` has read; `parser.error` is called for a value out of range."""
    if namespace.positional_model is not None:
        if "model" in namespace and namespace.model != namespace.positional_model:
            parser.error(
                f"the model is given twice: {namespace.positional_model} and --model "
                f"{namespace.model}"
            )
        namespace.model = namespace.positional_model
    try:
        engine, serve = make_config(EngineConfig, namespace), make_config(ServeConfig, namespace)
    except ValueError as error:
        parser.error(str(error))
    ignored = getattr(namespace, "ignored", None) or []
    warnings = [f"{flag} has no effect: {IGNORED_FLAGS[flag][1]}." for flag in ignored]
    return Command(engine, serve, warnings, namespace.origins, namespace.dump_config)
