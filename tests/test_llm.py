"""`LLM`: prompts of every kind, chat, streams, and what it refuses."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxllm import LLM, SamplingParams
from tests.serve.tiny_model import make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("llm")
    make_tiny_model(folder)
    made = LLM(
        str(folder),
        enforce_eager=True,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=64,
        compilation_cache_dir="",
    )
    yield made
    assert not made.llm_engine.has_unfinished_requests()


def test_text_ids_and_dicts_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello world")
    outputs = llm.generate(
        ["hello world", {"prompt": "hello world"}, {"prompt_token_ids": ids}, ids],
        GREEDY,
        use_tqdm=False,
    )
    assert [o.prompt_token_ids for o in outputs] == [ids] * 4
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert outputs[0].prompt == "hello world"
    assert outputs[0].outputs[0].text == llm.get_tokenizer().decode(outputs[0].outputs[0].token_ids)
    one = llm.generate(ids, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in one] == [outputs[0].outputs[0].token_ids]


def test_outputs_come_in_the_order_of_the_prompts_with_their_own_params(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (7, 1, 4)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [7, 1, 4]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 3


def test_detokenize_off_leaves_the_text_empty(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
    output = llm.generate("abc", params, use_tqdm=False)[0].outputs[0]
    assert (output.text, len(output.token_ids)) == ("", 3)


def test_chat_renders_the_template_once(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    single = llm.chat(messages, GREEDY, use_tqdm=False)
    several = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert len(single) == 1
    assert [o.prompt for o in several] == [single[0].prompt] * 2
    rendered = llm.get_tokenizer().apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True
    )
    assert single[0].prompt_token_ids == list(rendered)


def test_a_stream_grows_and_closing_it_aborts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    texts = [output.outputs[0].text for output in llm.stream("abc", params)]
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
    assert texts[-1] == llm.generate("abc", params, use_tqdm=False)[0].outputs[0].text
    stream = llm.stream("abc", params)
    next(stream)
    stream.close()
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    stats = llm.llm_engine.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks


def test_the_device_starts_while_prompts_are_still_being_queued(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [chr(ord("a") + i) * 20 for i in range(6)]
    alone = [llm.generate(p, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
    queued = itertools.count()
    started_at = []
    engine = llm.llm_engine.engine
    add, step = engine.add_request, engine.step
    monkeypatch.setattr(engine, "add_request", lambda r: (next(queued), add(r)))
    monkeypatch.setattr(engine, "step", lambda: (started_at.append(next(queued)), step())[1])
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in together] == alone
    assert started_at[0] < len(prompts), "the first step waited for the last prompt"
    assert started_at[1] > len(prompts), "more than one step was started early"


def test_a_late_bad_prompt_ends_those_that_have_started(llm: LLM) -> None:
    with pytest.raises(ValueError, match="context"):
        llm.generate([*("ab" * 15 for _ in range(4)), "b" * 5000], GREEDY, use_tqdm=False)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    stats = llm.llm_engine.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize(
    ("prompts", "params", "named"),
    [
        (["a", "b"], [GREEDY], "2 prompts, but 1"),
        ([{"text": "a"}], GREEDY, "prompt_token_ids"),
        (["a", 3.5], GREEDY, "float"),
        (["a", "b" * 5000], GREEDY, "context"),
    ],
)
def test_what_cannot_be_served_leaves_nothing_behind(
    llm: LLM, prompts: list, params: object, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        llm.generate(prompts, params, use_tqdm=False)  # pyright: ignore[reportArgumentType]
    assert not llm.llm_engine.has_unfinished_requests()


def test_an_unknown_engine_argument_is_named() -> None:
    with pytest.raises(TypeError, match="max_model_length"):
        LLM("demo", max_model_length=5)
