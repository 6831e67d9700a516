"""Text as tokens come: whole characters, stop strings, the same in every way of chunking."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE, WordPiece

from jaxllm.engine.detokenizer import Detokenizer
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.engine.tokenizer_files import TokenizerFiles
from jaxllm.sampling_params import SamplingParams
from tests.converters.gguf_files import CORPUS, sentence_piece_metadata

HARD = "ďábel 👩‍👩‍👧 世界 ก็"


def from_backend(backend: Backend) -> Tokenizer:
    return Tokenizer(TokenizerFiles(backend, {}, {}))


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load("demo")


@pytest.fixture(scope="module")
def sentence_piece() -> Tokenizer:
    from jaxllm.converters.gguf_tokenizer import tokenizer_from_gguf

    metadata = {"general.architecture": "llama", **sentence_piece_metadata()}
    return from_backend(tokenizer_from_gguf(metadata, "test").tokenizer)


@pytest.fixture(scope="module")
def metaspace() -> Tokenizer:
    """A decoder that is not additive: it treats the first token apart."""
    backend = Backend(BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(special_tokens=["<unk>"], vocab_size=300, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return from_backend(backend)


@pytest.fixture(scope="module")
def word_piece() -> Tokenizer:
    backend = Backend(WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        special_tokens=["[UNK]"], vocab_size=300, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return from_backend(backend)


def run(
    tokenizer: Tokenizer,
    ids: list[int],
    sizes: list[int] | None = None,
    prompt: tuple[int, ...] = (),
    **params: Any,
) -> tuple[list[str], str | None]:
    """The deltas, with the ids pushed in groups of these sizes, and the stop string."""
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(**params))
    deltas, stop = [], None
    rest = list(ids)
    sizes = list(sizes or [])
    while rest and stop is None:
        size = sizes.pop(0) if sizes else 1
        delta, stop = detokenizer.push(rest[:size])
        deltas.append(delta)
        rest = rest[size:]
    deltas.append(detokenizer.finish())
    assert "".join(deltas) == detokenizer.text
    assert detokenizer.stop == stop
    return deltas, stop


class TestCharacters:
    @given(
        ids=st.lists(st.integers(0, 49151)),
        sizes=st.lists(st.integers(0, 5)),
        skip=st.booleans(),
    )
    @settings(max_examples=400, deadline=None)
    def test_sum_equals_decode(
        self, ids: list[int], sizes: list[int], skip: bool, demo: Tokenizer
    ) -> None:
        deltas, _ = run(demo, ids, sizes, skip_special_tokens=skip)
        assert "".join(deltas) == demo.decode(ids, skip_special_tokens=skip)

    @given(text=st.text(max_size=30), sizes=st.lists(st.integers(0, 5)))
    @settings(max_examples=300, deadline=None)
    def test_no_broken_characters_on_the_way(
        self, text: str, sizes: list[int], demo: Tokenizer
    ) -> None:
        # Bytes that the vocabulary lacks are unknown, hence special, tokens.
        ids = demo.encode(text)
        wanted = demo.decode(ids, skip_special_tokens=True)
        deltas, _ = run(demo, ids, sizes)
        assert "".join(deltas) == wanted
        if "\ufffd" not in wanted:
            assert not any("\ufffd" in delta for delta in deltas)

    def test_text_comes_with_the_token_that_completes_it(self, demo: Tokenizer) -> None:
        ids = demo.encode(HARD)
        deltas, _ = run(demo, ids)
        done = 0
        for number, delta in enumerate(deltas[:-1], start=1):
            done += len(delta)
            complete = demo.decode(ids[:number]).rstrip("\ufffd")
            assert done == len(complete)
        assert deltas[-1] == ""

    def test_a_forced_cut_within_a_character(self, demo: Tokenizer) -> None:
        ids = demo.encode("ok 👧")[:-1]
        deltas, _ = run(demo, ids)
        assert "".join(deltas) == demo.decode(ids) == "ok \ufffd"
        assert deltas[-1] == "\ufffd"

    def test_special_tokens_are_hidden_or_not(self, demo: Tokenizer) -> None:
        ids = demo.encode("a<|im_end|> b")
        assert "".join(run(demo, ids)[0]) == "a b"
        assert "".join(run(demo, ids, skip_special_tokens=False)[0]) == "a<|im_end|> b"

    @given(text=st.text(st.sampled_from("the quick ďábel 👩‍👧世\n 12"), max_size=40))
    @settings(max_examples=200, deadline=None)
    def test_sentence_piece_sum_equals_decode(self, text: str, sentence_piece: Tokenizer) -> None:
        ids = sentence_piece.encode(text, add_special_tokens=False)
        deltas, _ = run(sentence_piece, ids)
        assert "".join(deltas) == sentence_piece.decode(ids) == text
        assert not any("\ufffd" in delta for delta in deltas)

    def test_sentence_piece_cut_within_a_character(self, sentence_piece: Tokenizer) -> None:
        ids = sentence_piece.encode("the 👹", add_special_tokens=False)
        assert sentence_piece.id_to_piece(ids[-1]) == "<0xB9>"
        for cut in (1, 2, 3):
            deltas, _ = run(sentence_piece, ids[:-cut])
            assert "".join(deltas) == sentence_piece.decode(ids[:-cut])

    @pytest.mark.parametrize("kind", ["sentence_piece", "metaspace", "word_piece"])
    def test_text_after_a_prompt_keeps_its_space(
        self, kind: str, request: pytest.FixtureRequest
    ) -> None:
        tokenizer: Tokenizer = request.getfixturevalue(kind)
        ids = tokenizer.encode("the quick brown the", add_special_tokens=False)
        whole = tokenizer.decode(ids)
        for cut in range(len(ids) + 1):
            deltas, _ = run(tokenizer, ids[cut:], prompt=tuple(ids[:cut]))
            assert tokenizer.decode(ids[:cut]) + "".join(deltas) == whole

    @pytest.mark.parametrize("kind", ["metaspace", "word_piece"])
    def test_any_other_decoder(self, kind: str, request: pytest.FixtureRequest) -> None:
        tokenizer: Tokenizer = request.getfixturevalue(kind)
        assert not tokenizer.bytes.additive
        for text in CORPUS:
            ids = tokenizer.encode(text)
            assert "".join(run(tokenizer, ids)[0]) == tokenizer.decode(ids)


def stopped(text: str, stops: list[str], include: bool = False) -> tuple[str, str | None]:
    """What stop strings make of a text that comes character by character."""
    for end in range(1, len(text) + 1):
        ends = [stop for stop in stops if text[:end].endswith(stop)]
        if ends:
            stop = max(ends, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


class TestStops:
    @given(data=st.data())
    @settings(max_examples=500, deadline=None)
    def test_as_if_by_characters(self, data: st.DataObject, demo: Tokenizer) -> None:
        alphabet = st.sampled_from(["a", "b", "ab", " the", "the", "\n\n", "世", "👧"])
        text = data.draw(st.lists(alphabet, max_size=20).map("".join))
        parts = st.lists(alphabet, min_size=1, max_size=3).map("".join)
        stops = data.draw(st.lists(parts, min_size=1, max_size=3))
        include = data.draw(st.booleans())
        sizes = data.draw(st.lists(st.integers(0, 4)))
        deltas, stop = run(
            demo, demo.encode(text), sizes, stop=stops, include_stop_str_in_output=include
        )
        assert ("".join(deltas), stop) == stopped(text, stops, include)

    def test_straddling_and_mid_token(self, demo: Tokenizer) -> None:
        ids = demo.encode("Hello wonderful world")
        assert "".join(run(demo, ids, stop="lo won")[0]) == "Hel"
        deltas, stop = run(demo, ids, stop="lo won", include_stop_str_in_output=True)
        assert "".join(deltas) == "Hello won"
        assert stop == "lo won"

    @pytest.mark.parametrize("stops", [["world", "worl"], ["worl", "world"]])
    def test_one_a_prefix_of_the_other(self, stops: list[str], demo: Tokenizer) -> None:
        ids = demo.encode("Hello world!")
        for sizes in ([1] * 9, [9]):
            assert run(demo, ids, sizes, stop=stops) == (
                run(demo, ids, sizes, stop=["worl"])[0],
                "worl",
            )

    def test_a_stop_that_does_not_complete_is_given_out(self, demo: Tokenizer) -> None:
        deltas, stop = run(demo, demo.encode("say world"), stop=" world wide")
        assert stop is None
        assert deltas[-1] == " world"
        assert "".join(deltas) == "say world"

    def test_only_what_may_be_a_stop_is_held(self, demo: Tokenizer) -> None:
        ids = demo.encode("one two three")
        assert [demo.token_text(i) for i in ids] == ["one", " two", " three"]
        deltas, _ = run(demo, ids, stop="wo four, a stop that begins in a token")
        assert deltas == ["one", " t", "wo three", ""]

    def test_nothing_after_a_stop(self, demo: Tokenizer) -> None:
        detokenizer = Detokenizer(demo, (), SamplingParams(stop="b"))
        assert detokenizer.push(demo.encode("a b c")) == ("a ", "b")
        assert detokenizer.push(demo.encode("d")) == ("", "b")
        assert detokenizer.finish() == ""
        assert detokenizer.text == "a "

    def test_min_tokens_come_before_any_stop(self, demo: Tokenizer) -> None:
        ids = demo.encode(" the the the the")
        assert len(ids) == 4
        deltas, stop = run(demo, ids, stop="the", min_tokens=2)
        assert "".join(deltas) == " the the "
        assert stop == "the"

    @pytest.mark.parametrize("include", [False, True])
    def test_text_of_a_stop_token(self, include: bool, demo: Tokenizer) -> None:
        params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=False)
        detokenizer = Detokenizer(demo, (), params)
        ids = demo.encode("a<|im_end|>")
        detokenizer.push(ids, ends_with_stop_token=True)
        assert detokenizer.text + detokenizer.finish() == ("a<|im_end|>" if include else "a")
