"""Pipeline stages on virtual devices: the same tokens, equal bytes, nobody waits for the host."""

import re
from pathlib import Path

import jax
import pytest

from jaxllm.engine.fit import GIB, make_request
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.local_engine import LocalEngine
from jaxllm.outputs import RequestOutput
from jaxllm.runner.estimate import Parallel
from jaxllm.runner.memory import with_fewest_blocks
from jaxllm.runner.weights import flatten
from tests.runner.parallel_models import BLOCKS, LAYERS, check_same, generate, make_config

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [("llama", 1, 2), ("llama-tied", 2, 2), ("qwen2", 1, 4), ("qwen3", 2, 4)],
)
def test_tokens_and_logprobs_are_those_of_one_device(
    folders: dict[str, Path],
    expected: dict[str, list[RequestOutput]],
    name: str,
    tp: int,
    pp: int,
) -> None:
    eager = name != "llama"
    changes = {"max_num_seqs": pp, "enforce_eager": eager}
    engine = LocalEngine(make_config(folders[name], tp, pp, **changes))
    lanes, compiled = watch_lanes(engine.engine), engine.engine.runner.programs.num_compiled
    outputs = generate(engine)
    # Ahead of time, every stage's programs are there before serving begins.
    assert eager or engine.engine.runner.programs.num_compiled == compiled > 0
    check_same(outputs, expected[name])
    stats = engine.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    assert len(outputs[0].prompt_token_ids) > (engine.config.max_num_batched_tokens or 0)
    assert lanes == {*range(pp)}
    check_bytes(engine, folders[name], tp, pp)


def watch_lanes(engine: LLMEngine) -> set[int]:
    """The lanes whose steps run from now on."""
    lanes: set[int] = set()
    execute = engine.runner.execute

    def watched(steps):
        lanes.update(step.lane for step in steps)
        return execute(steps)

    engine.runner.execute = watched
    return lanes


def check_bytes(engine: LocalEngine, folder: Path, tp: int, pp: int) -> None:
    """What is really on each device, what the engine's tables say, and the plan's."""
    runner = engine.engine.runner
    config = make_config(folder, tp, pp, max_num_seqs=pp)
    planned = make_request(config, GIB, Parallel(tp, pp)).stages()
    plans = with_fewest_blocks([each.plan for each in planned])
    assert sum(len(each.stage.layers) for each in planned) == LAYERS
    for stage, plan, told in zip(runner.stages, plans, engine.engine.stage_memory, strict=True):
        index = stage.stage.index
        devices = {*stage.mesh.devices.flat}
        assert devices == {*jax.devices()[index * tp : (index + 1) * tp]}
        for holder, leaves in (
            (plan.holders.weights, flatten(runner.params[index]).values()),
            (plan.cache, runner._state.caches[index]),
        ):
            shards = [shard for leaf in leaves for shard in leaf.addressable_shards]
            for device in devices:
                assert sum(s.data.nbytes for s in shards if s.device == device) == holder
            assert {shard.device for shard in shards} == devices
        kept = [runner._state.rows, runner._state.last_tokens] if stage.stage.last else []
        kept += [runner._state.fed] if stage.stage.first else []
        each = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(kept))
        assert each == plan.holders.sampler == told.holders.sampler
        assert told.holders.weights == plan.holders.weights
        assert (told.cache, told.num_blocks) == (plan.cache, BLOCKS)


def test_more_stages_than_layers_are_refused_before_anything_is_read(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxllm.engine.startup.load_params", lambda *_, **__: pytest.fail("read"))
    message = f"--pipeline-parallel-size 5 exceeds num_hidden_layers = {LAYERS}"
    with pytest.raises(ValueError, match=re.escape(message)):
        LocalEngine(make_config(folders["llama"], 1, 5))


def test_more_devices_than_there_are_are_refused(folders: dict[str, Path]) -> None:
    message = "--tensor-parallel-size 4 times --pipeline-parallel-size 4 needs 16 devices, but JAX"
    with pytest.raises(ValueError, match=message):
        LocalEngine(make_config(folders["llama"], 4, 4))
