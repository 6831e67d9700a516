"""From the flags to a group whose devices JAX sees as one machine's."""

import logging
import os
from collections.abc import Callable
from typing import NoReturn

import jax

from jaxllm.config import EngineConfig
from jaxllm.engine.distributed.facts import facts_of
from jaxllm.engine.distributed.group import Fail, Follower, Group, Leader
from jaxllm.engine.distributed.links import (
    SILENCE_S,
    Welcome,
    bind_address,
    listen,
    split_address,
)
from jaxllm.engine.distributed.meeting import find_leader, wait_for_all

logger = logging.getLogger(__name__)

SHUTDOWN_S = 5


def join(config: EngineConfig, fail: Fail, leave: Callable[[], NoReturn]) -> Group:
    """Meets the other processes; to be called before JAX touches a device.

    Raises:
        ValueError, OSError: there is no such group for us; says why.
    """
    assert config.coordinator_address
    facts = facts_of(config)
    host = split_address(config.coordinator_address)[0]
    if config.process_id == 0:
        links = wait_for_all(config, facts)
        with listen(host, 0) as probe:
            port = probe.getsockname()[1]
        group: Group = Leader(links, fail)
        group.send(Welcome(port))
    else:
        link, port = find_leader(config, facts)
        group = Follower(link, fail, leave)
    _start_jax(config, host, port)
    logger.info(
        "Process %d of %d has %d of %d devices",
        jax.process_index(),
        jax.process_count(),
        jax.local_device_count(),
        jax.device_count(),
    )
    return group


def _start_jax(config: EngineConfig, host: str, port: int) -> None:
    # XLA would have the processes share out the trials of kernels and wait for each other's. One
    # that finds its program in the compilation cache makes none, and the others would hang.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_shard_autotuning=false".strip()
    # It would take SIGTERM for itself, and the front says when to stop.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        coordinator_bind_address=bind_address(host, port),
        num_processes=config.num_processes,
        process_id=config.process_id,
        cluster_detection_method="deactivate",  # cluster.py has asked, where it was to
        initialization_timeout=config.join_timeout,
        heartbeat_timeout_seconds=SILENCE_S,
        shutdown_timeout_seconds=SHUTDOWN_S,
    )


def check_devices(config: EngineConfig) -> None:
    """Refuses devices without a part of the model: their process would wait for ever."""
    needed, found = config.tensor_parallel_size, jax.device_count()
    if needed != found:
        raise ValueError(
            f"The {config.num_processes} processes have {found} devices together, but "
            f"--tensor-parallel-size {needed} needs {needed}: set it to {found}, or show each "
            "process fewer devices (CUDA_VISIBLE_DEVICES)."
        )
