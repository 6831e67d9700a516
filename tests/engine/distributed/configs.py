"""Configs of the processes of one group, that differ in nothing but the process."""

import socket
from typing import Any

from jaxllm import EngineConfig


def configs(count: int = 2, **options: Any) -> list[EngineConfig]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = {"coordinator_address": address, "num_processes": count, **options}
    return [EngineConfig(process_id=i, **options) for i in range(count)]
