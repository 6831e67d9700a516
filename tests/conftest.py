"""Every test runs on the CPU with eight virtual devices, unless it is marked `gpu`; what is marked
`thorough` runs only where that is asked for."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Eight virtual devices on two cores: one thread a device keeps XLA from oversubscribing them.
os.environ.setdefault("OMP_NUM_THREADS", "2")

import jax
import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skipped = {}
    if jax.default_backend() != "gpu":
        skipped["gpu"] = "needs an NVIDIA GPU"
    if "thorough" not in config.option.markexpr:
        skipped["thorough"] = "takes minutes: pytest -m thorough"
    for item in items:
        for marker, reason in skipped.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
