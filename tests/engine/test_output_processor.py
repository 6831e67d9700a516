"""From requests to sequences, and from the engine's news to text, logprobs and endings."""

from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxllm.engine.inputs import ContextLengthError, GenerationInput
from jaxllm.engine.output_processor import OutputProcessor, ProcessedOutputs, merge_delta
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.engine.tokenizer_files import TokenizerFiles
from jaxllm.outputs import EngineOutput, RequestOutput, TokenLogprobs
from jaxllm.sampling_params import SamplingParams

EOS = 256


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token a byte, its id from an alphabet in code point order; 256 is eos."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(TokenizerFiles(backend, {"eos_token": "</s>"}, {}))


@pytest.fixture
def processor(tokenizer: Tokenizer) -> OutputProcessor:
    return OutputProcessor(
        tokenizer, max_model_len=64, vocab_size=257, max_logprobs=5, eos_token_ids=[EOS]
    )


def request(prompt: list[int] | None = None, kind: Any = "cumulative", **params: Any):
    return GenerationInput(
        request_id="r",
        prompt_token_ids=[1, 2, 3] if prompt is None else prompt,
        sampling_params=SamplingParams(**{"max_tokens": 32, **params}),
        prompt="the prompt",
        kind=kind,
    )


def one(processor: OutputProcessor, *outputs: EngineOutput) -> RequestOutput:
    (output,) = processor.process(outputs).request_outputs
    return output


def test_n_sequences_with_ids_groups_and_seeds(processor):
    sequences = processor.add(request(n=3, seed=7))
    assert [s.request_id for s in sequences] == ["r-0", "r-1", "r-2"]
    assert [s.seed for s in sequences] == [7, 8, 9]
    assert {s.group_id for s in sequences} == {"r"}
    assert all(s.stop_ids == {EOS} for s in sequences)
    processor.abort("r")
    (single,) = processor.add(request(seed=2**64 - 1))
    assert single.group_id is None
    assert single.seed == 2**64 - 1
    processor.abort("r")
    assert processor.add(request(n=2, seed=2**64 - 1))[1].seed == 0  # stays within 64 bits


@pytest.mark.parametrize(
    ("prompt", "params", "error", "said"),
    [
        ([], {}, ValueError, "empty"),
        ([1, 257], {}, ValueError, "257.*size 257"),
        ([-1], {}, ValueError, "-1"),
        ([1] * 64, {}, ContextLengthError, "64 tokens.* has 64"),
        ([1] * 40, {"max_tokens": 25}, ContextLengthError, "65 were asked for: 40 .*max_tokens=25"),
        ([1], {"logit_bias": {257: 1}}, ValueError, "257"),
        ([1], {"stop_token_ids": [300]}, ValueError, "300"),
        ([1], {"logprobs": 6}, ValueError, "at most 5"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(processor, prompt, params, error, said):
    with pytest.raises(error, match=said):
        processor.add(request(prompt, **params))
    assert not processor.has_unfinished()


def test_lengths_up_to_the_context_are_taken(processor):
    processor.add(request([1] * 32))
    with pytest.raises(ValueError, match="already in use"):
        processor.add(request())
    processor.abort("r")
    processor.add(request([1] * 63, max_tokens=None))


def test_cumulative_delta_and_final_say_the_same(tokenizer, processor):
    ids = tokenizer.encode("añ世!")
    seen: dict[str, str] = {}
    counts = {}
    for kind in ("cumulative", "delta", "final"):
        processor.add(request(kind=kind))
        outputs = []
        for i, token in enumerate(ids):
            reason = "length" if i == len(ids) - 1 else None
            news = EngineOutput("r-0", [token], finish_reason=reason)
            outputs += processor.process([news]).request_outputs
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].finish_reason == "length"
        texts = [o.outputs[0].text for o in outputs]
        tokens = [o.outputs[0].token_ids for o in outputs]
        seen[kind] = "".join(texts) if kind == "delta" else texts[-1]
        joined = [token for each in tokens for token in each]
        assert (joined if kind == "delta" else tokens[-1]) == ids
        counts[kind] = len(outputs)
        assert not processor.has_unfinished()
    assert set(seen.values()) == {"añ世!"}
    assert counts == {"cumulative": len(ids), "delta": len(ids), "final": 1}


def test_snapshots_do_not_change_afterwards(processor):
    processor.add(request())
    first = one(processor, EngineOutput("r-0", [10]))
    one(processor, EngineOutput("r-0", [11]))
    assert first.outputs[0].token_ids == [10]


def test_deltas_hold_only_sequences_with_news(processor):
    processor.add(request(kind="delta", n=3))
    output = one(processor, EngineOutput("r-1", [10]), EngineOutput("r-2", []))
    assert [c.index for c in output.outputs] == [1]
    assert processor.process([EngineOutput("r-0", [])]).request_outputs == []


def test_a_request_ends_with_its_last_sequence(processor):
    processor.add(request(n=2))
    output = one(processor, EngineOutput("r-1", [10], finish_reason="length"))
    assert not output.finished
    assert [c.finish_reason for c in output.outputs] == [None, "length"]
    # The other one's news only; the ended one gets no more.
    output = one(
        processor,
        EngineOutput("r-1", [11]),
        EngineOutput("r-0", [12], finish_reason="stop"),
    )
    assert output.finished
    assert output.outputs[1].token_ids == [10]
    assert not processor.has_unfinished()


def test_eos_and_stop_tokens_are_ids_without_text(tokenizer, processor):
    (letter,) = tokenizer.encode("x")
    for params, last, stop_reason in (
        ({}, EOS, None),
        ({"stop_token_ids": [letter]}, letter, letter),
    ):
        processor.add(request(skip_special_tokens=False, **params))
        news = EngineOutput("r-0", [letter, last], finish_reason="stop", stop_reason=stop_reason)
        (completion,) = one(processor, news).outputs
        assert completion.token_ids == [letter, last]
        assert completion.text == "x"
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop_reason)
    processor.add(request(stop_token_ids=[letter], include_stop_str_in_output=True))
    news = EngineOutput("r-0", [letter], finish_reason="stop", stop_reason=letter)
    assert one(processor, news).outputs[0].text == "x"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("size", [1, 2, 20])
def test_a_stop_string_ends_text_and_tokens_at_the_same_place(tokenizer, processor, include, size):
    """However many tokens come at once, and whatever else came behind the stop."""
    ids = tokenizer.encode("say STOP and more")
    processor.add(request(stop="STOP", include_stop_str_in_output=include))
    aborts: list[str] = []
    output = None
    for start in range(0, len(ids), size):
        processed = processor.process([EngineOutput("r-0", ids[start : start + size])])
        aborts += processed.aborts
        output = (processed.request_outputs or [output])[-1]
    assert aborts == ["r-0"]
    assert output is not None
    assert output.finished
    (completion,) = output.outputs
    assert completion.text == ("say STOP" if include else "say ")
    assert completion.token_ids == ids[: len("say STOP")]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "STOP")
    assert not processor.has_unfinished()


def test_a_stop_string_in_the_last_step_needs_no_abort(tokenizer, processor):
    processor.add(request(stop="x"))
    news = EngineOutput("r-0", tokenizer.encode("ax"), finish_reason="length")
    processed = processor.process([news])
    assert processed.aborts == []
    assert processed.request_outputs[0].outputs[0].stop_reason == "x"


def test_what_might_have_become_a_stop_comes_at_the_end(tokenizer, processor):
    processor.add(request(stop="STOP", kind="delta"))
    texts = []
    for i, token in enumerate(tokenizer.encode("a STO")):
        news = EngineOutput("r-0", [token], finish_reason="length" if i == 4 else None)
        texts.append(one(processor, news).outputs[0].text)
    assert texts == ["a", " ", "", "", "STO"]


def test_logprobs_are_dicts_with_ranks_and_text(tokenizer, processor):
    a, b, c = tokenizer.encode("abc")
    processor.add(request(logprobs=2))
    output = one(
        processor,
        EngineOutput("r-0", [c], [TokenLogprobs([c, a, b], [-3.0, -0.5, -1.0], rank=9)]),
        EngineOutput("r-0", [a], [TokenLogprobs([a, a, b], [-0.25, -0.25, -2.0], rank=1)]),
    )
    (completion,) = output.outputs
    assert completion.logprobs is not None
    first, second = completion.logprobs
    assert [(i, p.rank, p.decoded_token) for i, p in first.items()] == [
        (c, 9, "c"),
        (a, 1, "a"),
        (b, 2, "b"),
    ]
    assert [(i, p.logprob, p.rank) for i, p in second.items()] == [(a, -0.25, 1), (b, -2.0, 2)]
    assert completion.cumulative_logprob == -3.25


def test_deltas_carry_their_own_logprobs_and_the_whole_sum(processor):
    processor.add(request(logprobs=0, kind="delta"))
    for i in range(3):
        news = EngineOutput("r-0", [i], [TokenLogprobs([i], [-1.0], 1)])
        (completion,) = one(processor, news).outputs
        assert completion.logprobs is not None
        assert [list(entry) for entry in completion.logprobs] == [[i]]
        assert completion.cumulative_logprob == -(i + 1)


def test_merged_deltas_are_what_one_step_would_have_given(tokenizer, processor):
    """All of a request's deltas merged equal its final output."""

    def news(i: int) -> list[EngineOutput]:
        ids = tokenizer.encode("ab世x")
        ends = i == len(ids) - 1
        logprobs = [TokenLogprobs([ids[i]], [-0.5], 1)]
        first = EngineOutput("r-0", [ids[i]], logprobs, num_cached_tokens=2)
        last = EngineOutput("r-0", [ids[i]], logprobs, finish_reason="length", num_cached_tokens=2)
        other = EngineOutput("r-1", [7], [TokenLogprobs([7], [-1.0], 1)])
        stop = EngineOutput("r-1", [EOS], [TokenLogprobs([EOS], [-1.0], 1)], finish_reason="stop")
        return [last if ends else first, *([other] if i == 2 else [stop] if i == 3 else [])]

    results = {}
    for kind in ("delta", "final"):
        processor.add(request(kind=kind, n=2, logprobs=0))
        outputs = [o for i in range(6) for o in processor.process(news(i)).request_outputs]
        for later in outputs[1:]:
            merge_delta(outputs[0], later)
        results[kind] = outputs[0]
    assert results["delta"] == results["final"]


@pytest.mark.parametrize("sibling", ["r-0", "r-1"])
def test_prompt_logprobs_come_in_chunks_with_none_first(processor, sibling):
    """From whichever sequence the engine computes them for."""
    processor.add(request([5, 6, 7, 8], prompt_logprobs=0, kind="delta", n=2))
    entry = {i: TokenLogprobs([i], [-i / 10], 1) for i in (6, 7, 8)}
    assert processor.process([EngineOutput(sibling, prompt_logprobs=[entry[6]])]) == (
        ProcessedOutputs()
    )
    processor.process([EngineOutput(sibling, prompt_logprobs=[entry[7], entry[8]])])
    output = one(processor, EngineOutput("r-0", [9]))
    assert output.prompt_logprobs is not None
    assert [p and list(p) for p in output.prompt_logprobs] == [None, [6], [7], [8]]


def test_errors_and_cached_tokens_reach_the_output(processor):
    processor.add(request())
    output = one(processor, EngineOutput("r-0", [1], num_cached_tokens=2))
    assert output.num_cached_tokens == 2
    output = one(processor, EngineOutput("r-0", finish_reason="error", error="not finite"))
    assert output.error == "not finite"
    assert output.num_cached_tokens == 2
    assert output.outputs[0].finish_reason == "error"


def test_aborting_gives_the_sequences_that_still_run(processor):
    processor.add(request(n=3))
    processor.process([EngineOutput("r-1", [1], finish_reason="length")])
    assert processor.abort("r") == ["r-0", "r-2"]
    assert processor.abort("r") == []
    assert processor.process([EngineOutput("r-0", [1])]).request_outputs == []
    assert not processor.has_unfinished()


def test_without_a_tokenizer_there_are_ids_only():
    processor = OutputProcessor(
        None, max_model_len=64, vocab_size=257, max_logprobs=5, eos_token_ids=[EOS]
    )
    processor.add(request(logprobs=0, detokenize=False))
    output = one(processor, EngineOutput("r-0", [1], [TokenLogprobs([1], [-1.0], 1)]))
    (completion,) = output.outputs
    assert (completion.text, completion.token_ids) == ("", [1])
    assert completion.logprobs is not None
    assert completion.logprobs[0][1].decoded_token is None
