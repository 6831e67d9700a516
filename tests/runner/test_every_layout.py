"""Every model on every layout of up to eight devices; other tests take a sample of these."""

from pathlib import Path

import pytest

from jaxllm.engine.local_engine import LocalEngine
from jaxllm.outputs import RequestOutput
from tests.runner.parallel_models import MODELS, check_same, generate, make_config

pytestmark = [pytest.mark.usefixtures("quick_compiles"), pytest.mark.thorough]


@pytest.mark.parametrize(
    ("tp", "pp"), [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (2, 2), (2, 4)]
)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_logprobs_are_those_of_one_device(
    folders: dict[str, Path], expected: dict[str, list[RequestOutput]], name: str, tp: int, pp: int
) -> None:
    engine = LocalEngine(make_config(folders[name], tp, pp, max_num_seqs=max(pp, 2)))
    outputs = generate(engine)
    check_same(outputs, expected[name])
    stats = engine.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    assert len(outputs[0].prompt_token_ids) > (engine.config.max_num_batched_tokens or 0)
