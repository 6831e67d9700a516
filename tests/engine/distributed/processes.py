"""Configs for the processes of one group, and what stands for the processes themselves."""

import socket
import threading
import time
from typing import Any, NoReturn

from jaxllm import EngineConfig


def configs(count: int = 2, **options: Any) -> list[EngineConfig]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = {"coordinator_address": address, "num_processes": count, **options}
    return [EngineConfig(process_id=i, **options) for i in range(count)]


def stop(event: Any = None) -> NoReturn:
    """Stands for the end of a process: whoever calls it does nothing more."""
    if isinstance(event, threading.Event):
        event.set()
    while True:
        time.sleep(1000)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        return here, server.accept()[0]
