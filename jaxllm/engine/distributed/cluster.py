"""What SLURM, Open MPI or Kubernetes say of the processes, as JAX reads it."""

import multiprocessing
import os
import warnings
from multiprocessing.connection import Connection

from jaxllm.config import EngineConfig

FLAGS = ("--coordinator-address", "--num-processes", "--process-id")


def find_processes(config: EngineConfig) -> EngineConfig:
    """`config` with what --distributed stands for filled in.

    The devices that are this process's own, if the scheduler tells, go into the variable that JAX
    reads in the engine process. JAX is asked in a process of its own, once, since the server's must
    stay without it, and MPI can be asked once only.

    Raises:
        ValueError: nothing tells; says what was looked for.
    """
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_ask_jax, args=(there, config), daemon=True)
    child.start()
    there.close()
    try:
        found, error = here.recv()
    except EOFError:
        found, error = (None, None, None, None), "JAX ended without an answer"
    child.join()
    missing = [flag for flag, value in zip(FLAGS, found, strict=False) if value is None]
    if missing:
        raise ValueError(
            f"--distributed: neither SLURM, Open MPI nor Kubernetes tells {' and '.join(missing)}"
            f"{f' ({error})' if error else ''}. Give the flags, or leave out --distributed to run "
            "alone."
        )
    address, num_processes, process_id, devices = found
    if devices is not None:
        os.environ.setdefault("JAX_LOCAL_DEVICE_IDS", ",".join(map(str, devices)))
    return config.replace(
        coordinator_address=address, num_processes=num_processes, process_id=process_id
    )


def _ask_jax(answer: Connection, config: EngineConfig) -> None:
    # Not public, but what jax.distributed.initialize itself asks.
    from jax._src.clusters import ClusterEnv

    address = config.coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    found = given = address, config.num_processes, config.process_id, None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = ClusterEnv.auto_detect_unset_distributed_params(
                *given, None, config.join_timeout
            )
        except Exception as error:
            said_last = f"{type(error).__name__}: {error}"
        else:
            said_last = ""
    why = [*(str(warning.message) for warning in said), said_last]  # a missing package, say
    answer.send((found, " ".join(" ".join(why).split())))
