"""How many replicas there are and what each takes, beside the settings of engine and server."""

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxllm.serve.args import Command, FlagParser, add_flags, as_command, make_config, make_parser
from jaxllm.serve.options import _flag

logger = logging.getLogger(__name__)

_AT_LEAST = {
    "num_replicas": 1,
    "num_gpus": 0,
    "num_cpus": 0,
    "num_fronts": 1,
    "max_ongoing_requests": 1,
    "affinity_chars": 0,
    "affinity_slack": 0,
    "drain_timeout": 0,
}
# Settings of the server that replicas cannot follow -> what to do instead.
_SERVERS_OWN = {
    "dump_config": "GET /server_info gives the same",
    "shutdown_timeout": "give --drain-timeout",
    "uvicorn_log_level": "Ray writes the logs",
}
_WITH_SERVE_RUN: dict[str, str] = dict.fromkeys(
    ("host", "port"), "Ray opens the port: set http_options where Serve is started"
)
_SEVERAL_PROCESSES = dict.fromkeys(
    ("coordinator_address", "num_processes", "process_id", "distributed", "join_timeout"),
    "a replica is on one host; start an engine over several hosts without Ray",
)


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """The replicas' own settings.

    Raises:
        ValueError: a value is out of range; the message names the flag.
    """

    num_replicas: int = _flag("engines, each with a copy of the weights", default=1)
    num_gpus: float | None = _flag(
        "GPUs that Ray reserves for a replica, all on one host; by default one a device of the "
        "mesh, 0 to run on the CPU",
        default=None,
    )
    num_cpus: float = _flag("CPU cores that Ray reserves for a replica", default=1.0)
    num_fronts: int = _flag("processes that take requests and choose the replica", default=1)
    max_ongoing_requests: int = _flag(
        "requests that a replica holds at once, running or waiting; the rest wait before it",
        default=1024,
    )
    affinity_chars: int = _flag(
        "leading characters of a prompt, or of each message up to the user's first, by which "
        "requests that begin alike go to one replica; 0 turns it off",
        default=1024,
    )
    affinity_slack: int = _flag(
        "requests by which that replica may be busier than the least busy one", default=8
    )
    drain_timeout: float = _flag(
        "seconds that running requests get when a replica is replaced", default=600.0
    )

    def __post_init__(self) -> None:
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} must be at least {least}, got {value}.")


class _SettingsParser(FlagParser):
    """Raises ValueError where a command line would end the program."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(self._where + message)


def parse_args(argv: Sequence[str] | None = None) -> tuple[Command, ReplicaConfig]:
    """The command line of `python -m jaxllm.serve.ray`; leaves with exit code 2 for a bad flag."""
    parser = _with_replicas(make_parser())
    return _configs(parser, parser.parse(argv))


def parse_settings(settings: Mapping[str, Any]) -> tuple[Command, ReplicaConfig]:
    """The same from settings by name, whose values may be strings, as `serve run` gives them.

    Raises:
        ValueError: an unknown name or a value out of range.
    """
    parser = _with_replicas(make_parser(_SettingsParser))
    return _configs(parser, parser.parse_settings(settings), _WITH_SERVE_RUN)


def _with_replicas(parser: FlagParser) -> FlagParser:
    parser.prog = "python -m jaxllm.serve.ray"
    parser.usage = "python -m jaxllm.serve.ray [MODEL] [flags]   (--help lists the flags)"
    parser.description = "Serves a model by several engines over one OpenAI-compatible HTTP API."
    add_flags(parser.add_argument_group("replicas"), ReplicaConfig)
    return parser


def _configs(
    parser: FlagParser, namespace: argparse.Namespace, refused: Mapping[str, str] | None = None
) -> tuple[Command, ReplicaConfig]:
    command = as_command(parser, namespace)
    for name, instead in (_SERVERS_OWN | _SEVERAL_PROCESSES | dict(refused or {})).items():
        if getattr(namespace, name, None) is not None:
            parser.error(f"--{name.replace('_', '-')} is not for replicas: {instead}.")
    for warning in command.warnings:
        logger.warning("%s", warning)
    try:
        return command, make_config(ReplicaConfig, namespace)
    except ValueError as error:
        parser.error(str(error))
