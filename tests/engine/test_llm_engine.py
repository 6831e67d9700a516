"""The engine end to end on a tiny model: against transformers, and against itself alone."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jaxllm import SamplingParams
from jaxllm.engine.local_engine import LocalEngine
from jaxllm.outputs import RequestOutput
from jaxllm.runner.programs import StepPrograms
from tests.engine.tiny_engine import VOCAB, make_engine, run_all, save_tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in lengths]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def torch_logits(model: Any, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].numpy()


def test_greedy_tokens_equal_transformers(engine: LocalEngine, tiny_llama: Any) -> None:
    prompts = random_prompts([1, 5, 40, 130])
    for prompt, made in zip(prompts, tokens(run_all(engine, prompts, GREEDY)), strict=True):
        for i, token in enumerate(made):
            logits = torch_logits(tiny_llama[1], prompt + made[:i])[-1]
            assert logits[token] >= logits.max() - 1e-4


def test_logprobs_and_prompt_logprobs_equal_transformers(
    engine: LocalEngine, tiny_llama: Any
) -> None:
    # 330 tokens are more than one chunk of max_num_batched_tokens=317.
    prompts = random_prompts([1, 2, 30, 330], seed=1)
    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, logprobs=5, prompt_logprobs=3
    )
    for prompt, output in zip(prompts, run_all(engine, prompts, params), strict=True):
        made = output.outputs[0]
        logits = torch_logits(tiny_llama[1], prompt + made.token_ids)
        reference = torch.log_softmax(torch.tensor(logits), -1).numpy()
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        expected = reference[: len(prompt) - 1]
        for row, entry, token in zip(expected, output.prompt_logprobs[1:], prompt[1:], strict=True):
            check_entry(entry, token, row, 3)
        assert made.logprobs is not None
        for row, entry, token in zip(
            reference[len(prompt) - 1 : -1], made.logprobs, made.token_ids, strict=True
        ):
            check_entry(entry, token, row, 5)
        total = sum(e[t].logprob for e, t in zip(made.logprobs, made.token_ids, strict=True))
        assert made.cumulative_logprob == pytest.approx(total)


def check_entry(entry: Any, token: int, row: np.ndarray, count: int) -> None:
    order = np.argsort(-row)
    assert set(entry) == {token, *order[:count].tolist()}
    for key, value in entry.items():
        assert value.logprob == pytest.approx(row[key], abs=1e-4)
        assert value.rank == 1 + int(np.flatnonzero(order == key)[0])


def varied_params(count: int, seed: int) -> list[SamplingParams]:
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 1.2, "top_k": 9},
        {"temperature": 0.9, "top_p": 0.7, "min_p": 0.01},
        {"temperature": 0, "repetition_penalty": 1.4},
        {"temperature": 0.7, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"temperature": 1, "logit_bias": {7: 4.0, 9: -100}},
        {"temperature": 0, "logprobs": 2, "min_tokens": 3},
    ]
    return [
        SamplingParams(
            **kinds[i % len(kinds)], seed=rng.randrange(2**40), max_tokens=rng.randint(1, 24)
        )
        for i in range(count)
    ]


def test_concurrent_outputs_equal_solo_outputs(engine: LocalEngine) -> None:
    """24 requests for 7 slots, with every kind of sampling, one step ahead of the device."""
    rng = random.Random(5)
    prompts = random_prompts([rng.randint(1, 90) for _ in range(24)], seed=5)
    params = varied_params(24, seed=5)
    together = run_all(engine, prompts, params)
    alone = [run_all(engine, [p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    assert tokens(together) == tokens(alone)
    assert [o.outputs[0].finish_reason for o in together] == [
        o.outputs[0].finish_reason for o in alone
    ]


def test_several_steps_at_once_change_no_token(engine: LocalEngine, tiny_llama: Any) -> None:
    several = make_engine(tiny_llama[0], num_scheduler_steps=4, max_num_seqs=9, enforce_eager=True)
    programs = several.engine.runner.programs
    assert isinstance(programs, StepPrograms)
    prompts = random_prompts([5, 30, 8, 17, *[9] * 5], seed=6)
    stop = tokens(run_all(engine, prompts[2:3], GREEDY))[0][5]
    params = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=1, max_tokens=33, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=[stop]),
        *[SamplingParams(temperature=0, max_tokens=31, ignore_eos=True)] * 6,
    ]
    made = run_all(several, prompts, params)
    assert max(bucket.num_requests for bucket, _ in programs._multi_programs) == 9
    plain = run_all(engine, prompts, params)
    assert tokens(made) == tokens(plain)
    assert [o.outputs[0].finish_reason for o in made] == [o.outputs[0].finish_reason for o in plain]
    assert several.engine.stats().num_free_blocks == several.engine.stats().num_blocks


def test_preemption_changes_no_token(tiny_llama: Any) -> None:
    small = make_engine(
        tiny_llama[0], num_gpu_blocks_override=24, max_model_len=128, enforce_eager=True
    )
    prompts = random_prompts([30] * 7, seed=2)
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=40, ignore_eos=True, presence_penalty=p)
        for i, (t, p) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1), (0.5, 0), (0, 0), (2, 0)])
    ]
    together = run_all(small, prompts, params)
    assert small.engine.stats().num_preemptions > 0
    alone = [run_all(small, [p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    assert tokens(together) == tokens(alone)


@pytest.mark.parametrize("batch", range(1, 8))
def test_every_slot_at_every_bucket_edge(engine: LocalEngine, batch: int) -> None:
    edges = [15, 16, 17, 63, 64, 65, 300, 316, 317, 318]
    for start in range(0, len(edges), batch):
        prompts = random_prompts(edges[start : start + batch], seed=batch)
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        together = tokens(run_all(engine, prompts, params))
        assert together == [tokens(run_all(engine, [p], params))[0] for p in prompts]


def test_nothing_compiles_after_warm_up(engine: LocalEngine) -> None:
    before = engine.engine.runner.programs.num_compiled
    run_all(engine, random_prompts([3, 64, 200]), varied_params(3, 1))
    assert engine.engine.runner.programs.num_compiled == before


@pytest.mark.parametrize("max_tokens", [1, 20])
def test_the_same_prompt_again_block_aligned(engine: LocalEngine, max_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=5, ignore_eos=True)
    for length in (7, 8, 9, 16, 17):
        prompt = random_prompts([length], seed=100 + length + max_tokens)[0]
        first, second = (run_all(engine, [prompt], params)[0] for _ in range(2))
        twins = run_all(engine, [prompt, prompt], params)
        for output in (second, *twins):
            assert tokens([output]) == tokens([first])
            assert output.num_cached_tokens == (length - 1) // 8 * 8
            pairs = (first.outputs[0].logprobs or [], output.outputs[0].logprobs or [])
            for a, b in zip(*pairs, strict=True):
                assert set(a) == set(b)
                for key in a:
                    assert a[key].logprob == pytest.approx(b[key].logprob, abs=1e-5)


def test_outputs_with_and_without_prefix_caching_agree(
    engine: LocalEngine, tiny_llama: Any
) -> None:
    plain = make_engine(tiny_llama[0], enable_prefix_caching=False, enforce_eager=True)
    shared = random_prompts([40], seed=9)[0]
    prompts = [shared + tail for tail in random_prompts([1, 5, 12], seed=10)]
    cached = [run_all(engine, [p], GREEDY)[0] for p in prompts]
    assert [o.num_cached_tokens for o in cached[1:]] == [40, 40]
    uncached = [run_all(plain, [p], GREEDY)[0] for p in prompts]
    assert [o.num_cached_tokens for o in uncached] == [0, 0, 0]
    assert tokens(cached) == tokens(uncached)


def test_n_completions_share_the_prompt_and_differ(engine: LocalEngine) -> None:
    prompt = random_prompts([50], seed=20)[0]
    params = SamplingParams(n=4, temperature=1, seed=3, max_tokens=10, ignore_eos=True)
    output = run_all(engine, [prompt], params)[0]
    texts = [tuple(c.token_ids) for c in output.outputs]
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len(set(texts)) > 1
    again = run_all(engine, [prompt], params)[0]
    assert texts == [tuple(c.token_ids) for c in again.outputs]
    alone = SamplingParams(temperature=1, seed=5, max_tokens=10, ignore_eos=True)
    assert tuple(tokens(run_all(engine, [prompt], alone))[0]) == texts[2]


def test_stops(engine: LocalEngine) -> None:
    prompt = random_prompts([20], seed=21)[0]
    made = tokens(run_all(engine, [prompt], GREEDY))[0]
    stop = made[4]
    first = made.index(stop)
    stopped = run_all(
        engine,
        [prompt],
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop]),
    )[0].outputs[0]
    assert stopped.token_ids == made[: first + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    late = run_all(
        engine,
        [prompt],
        SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop], min_tokens=9
        ),
    )[0].outputs[0]
    assert len(late.token_ids) >= 10 or late.finish_reason == "length"
    assert stop not in late.token_ids[:9]


def test_abort_frees_everything_at_any_moment(engine: LocalEngine) -> None:
    rng = random.Random(3)
    for steps in range(8):
        prompts = random_prompts([rng.randint(1, 200) for _ in range(10)], seed=steps)
        for i, prompt in enumerate(prompts):
            engine.add_request(f"a{i}", prompt, GREEDY)
        for _ in range(steps):
            engine.step()
        for i in range(10):
            engine.abort_request(f"a{i}")
        while engine.has_unfinished_requests():
            engine.step()
        stats = engine.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        engine.engine.scheduler.check_integrity()


def test_overflow_ends_the_request_with_a_reason_and_spares_the_rest(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path)
    with torch.no_grad():
        # Token 5's gate and up outgrow float16 where nothing else comes near: its embedding
        # alone has this direction.
        model.model.embed_tokens.weight[:, 0] = 0
        model.model.embed_tokens.weight[5] = 0
        model.model.embed_tokens.weight[5, 0] = 1
        layer: Any = model.model.layers[0]
        layer.mlp.up_proj.weight[:, 0] = 3e4
        layer.mlp.gate_proj.weight[:, 0] = 3e4
        layer.self_attn.o_proj.weight.zero_()
    model.save_pretrained(tmp_path)
    half = make_engine(tmp_path, dtype="float16", enforce_eager=True)
    good, bad = random_prompts([12], seed=30)[0], [5] * 12
    good = [t for t in good if t != 5]
    results = run_all(half, [good, bad, good], GREEDY)
    solo = run_all(half, [good], GREEDY)
    assert solo[0].outputs[0].finish_reason == "length"
    assert tokens([results[0], results[2]]) == tokens(solo * 2)
    assert results[1].outputs[0].finish_reason == "error"
    assert "float16" in (results[1].error or "")
    assert "bfloat16" in (results[1].error or "")


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"logit_bias": {VOCAB: 1}}, "logit_bias key 160"),
        ({"stop_token_ids": [10**6]}, "1000000"),
        ({"logprobs": 21}, "--max-logprobs"),
        ({"prompt_logprobs": 21}, "--max-logprobs"),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing(
    engine: LocalEngine, params: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        engine.add_request("bad", [3, 4], SamplingParams(**params))
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1], list(range(3, 150)) * 3])
def test_bad_prompts_are_refused(engine: LocalEngine, prompt: list[int]) -> None:
    with pytest.raises(ValueError):
        engine.add_request("bad", prompt, GREEDY)
    assert not engine.has_unfinished_requests()


def test_a_model_too_long_for_its_context_is_refused(tiny_llama: Any) -> None:
    with pytest.raises(ValueError, match=r"--max-model-len 1000.*512"):
        make_engine(tiny_llama[0], max_model_len=1000)
