"""What runs before serving begins."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from jaxllm.engine.local_engine import LocalEngine
from jaxllm.runner.buckets import Bucket
from jaxllm.runner.sampler import SamplingMode
from tests.runner.parallel_models import make_config


@pytest.mark.usefixtures("quick_compiles")
def test_every_program_of_a_gpu_runs_twice_and_long_steps_no_more(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = LocalEngine(make_config(folders["llama"], 1)).engine.runner
    programs = runner.programs
    monkeypatch.setattr(programs, "_common", replace(programs._common, modes=(*SamplingMode,)))
    monkeypatch.setattr(runner, "_config", runner._config.replace(enforce_eager=False))
    monkeypatch.setattr(runner, "_gpu", True)
    steps: Counter[Bucket] = Counter()
    samplers: Counter[tuple[int, SamplingMode]] = Counter()
    dispatch = runner._dispatch

    def watched(step, bucket, mode):
        steps[bucket] += 1
        samplers[bucket.num_requests, mode] += 1
        return dispatch(step, bucket, mode)

    monkeypatch.setattr(runner, "_dispatch", watched)
    runner.warm_up()
    assert {*steps} == {*runner.buckets}
    assert min(samplers.values()) >= 2
    assert {*samplers} == {(n, mode) for n, _ in programs._samplers for mode in SamplingMode}
    assert {count for bucket, count in steps.items() if not bucket.decode_only} == {2}
    assert min(steps.values()) == 2
