"""The Ray Serve application: fronts before replicas, and the command that runs it."""

import logging
from collections.abc import Sequence
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import HTTPOptions, RequestRouterConfig
from starlette.applications import Starlette

from jaxllm.config import EngineConfig
from jaxllm.engine.engine_loop import LOG_DATE_FORMAT, LOG_FORMAT
from jaxllm.serve.args import Command
from jaxllm.serve.ray.affinity import PrefixAffinityRouter
from jaxllm.serve.ray.front import make_front
from jaxllm.serve.ray.options import ReplicaConfig, parse_args, parse_settings
from jaxllm.serve.ray.replica import Replica

logger = logging.getLogger(__name__)

FRONT, REPLICA = "Front", "Replica"
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 30.0
MOST_STARTS = 3
MOST_AT_A_FRONT = 100_000


def app(args: dict[str, Any]) -> Application:
    """The builder that `serve run jaxllm.serve.ray:app model=... num_replicas=2` calls.

    Args:
        args: the flags of `python -m jaxllm.serve.ray` by name.

    Raises:
        ValueError: an unknown name or a value out of range.
    """
    return make_application(*parse_settings(args))


def make_application(command: Command, options: ReplicaConfig) -> Application:
    """Fronts that share out requests over the replicas."""
    gpus = options.num_gpus if options.num_gpus is not None else num_devices(command.engine)
    resources: dict[str, Any] = {"num_cpus": options.num_cpus, "num_gpus": gpus}
    if gpus == 0:
        # Or every replica would take all GPUs that the host may have.
        resources["runtime_env"] = {"env_vars": {"JAX_PLATFORMS": "cpu"}}
    replica = serve.deployment(Replica).options(
        name=REPLICA,
        logging_config={"enable_access_log": False},  # the front's says it
        num_replicas=options.num_replicas,
        ray_actor_options=resources,
        max_ongoing_requests=options.max_ongoing_requests,
        request_router_config=RequestRouterConfig.model_validate(
            {
                "request_router_class": PrefixAffinityRouter,
                "request_router_kwargs": {"slack": options.affinity_slack},
            }
        ),
        graceful_shutdown_timeout_s=options.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        max_constructor_retry_count=MOST_STARTS,
    )
    limits = {
        "max_body_bytes": command.serve.max_body_bytes,
        "affinity_chars": options.affinity_chars,
    }

    def build_front() -> Starlette:
        name = serve.get_replica_context().app_name
        return make_front(serve.get_deployment_handle(REPLICA, app_name=name), **limits)

    front = serve.deployment(serve.ingress(build_front)()).options(
        name=FRONT,
        logging_config={"enable_access_log": not command.serve.disable_uvicorn_access_log},
        num_replicas=options.num_fronts,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MOST_AT_A_FRONT,
        graceful_shutdown_timeout_s=options.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        max_surge_percent=100,  # a front is cheap: the new one comes before the old one goes
    )
    return front.bind(replica.bind(command))


def num_devices(config: EngineConfig) -> int:
    """Devices of a replica's mesh."""
    return config.tensor_parallel_size * config.pipeline_parallel_size


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m jaxllm.serve.ray`: runs the application until it is interrupted."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, datefmt=LOG_DATE_FORMAT)
    command, options = parse_args(argv)
    host = command.serve.host or "0.0.0.0"
    serve.start(http_options=HTTPOptions(host=host, port=command.serve.port))
    try:
        serve.run(make_application(command, options), blocking=True)
    except RuntimeError as error:
        logger.error("%s The replicas' own errors stand above.", error)
        return 1
    return 0
