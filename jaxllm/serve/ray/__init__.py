"""Replicas of the engine behind one address, as a Ray Serve application (extra `ray`)."""

from jaxllm.serve.ray.application import app

__all__ = ["app"]
