"""Tokenizers rebuilt from GGUF metadata give transformers' ids."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from jaxllm.converters.checkpoint import demo_path
from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.gguf_checkpoint import open_gguf
from jaxllm.converters.gguf_pre_tokenizers import PRE_TOKENIZERS
from jaxllm.converters.gguf_tokenizer import (
    GgufTokenizer,
    tokenizer_from_gguf,
    write_tokenizer_files,
)
from tests.converters.gguf_files import (
    CORPUS,
    bpe_metadata,
    demo_by_transformers,
    model_metadata,
    model_tensors,
    sentence_piece_metadata,
    sentence_piece_model,
    vocabulary_metadata,
    write_gguf,
)

pytestmark = pytest.mark.filterwarnings("ignore")

PIECES = [
    "1234567", " 3.14159", "don't", "WE'LL they've", "👩‍👩‍👧", "🙂🙃", "a\r\nb\r\n",
    "\ttab\t\ttabs", " " * 20, "\n\n\n", "    return x", "<|im_start|>user", "<|im_end|>",
    "世界你好", "日本語のテキスト",
    "한국어", "Привет, мир", "مرحبا", "ก็ ไทย", "ďábel", "naïve café", "e\u0301 decomposed",
    "x = {'a': [1, 2]}", "https://example.com/?q=1&r=2", "<html><b>bold</b></html>", "C:\\path",
    "$100.50", "50%", "#include <stdio.h>", "for (int i=0;i<10;i++)", "\u200bzero\u200dwidth",
    "\xa0nbsp", "ﬁ ligature", "Ⅷ ½ ²", "—dash–", "“quotes”", "…", "A" * 40, "mixedCASE_snake-kebab",
    "the The THE", "", "ok.", "Hello, world!", "a-b", "  two blanks", "x\\ny", "(a)[b]{c}",
]  # fmt: skip


def texts() -> list[str]:
    """Some 220 varied texts: each piece alone, between words, and by twos."""
    alone = [*PIECES, *CORPUS]
    framed = [f"Say {piece} now" for piece in PIECES]
    doubled = [f"{a}{b}" for a, b in zip(PIECES, [*PIECES[7:], *PIECES[:7]], strict=True)]
    spaced = [f" {a} {b}\n" for a, b in zip(PIECES, [*PIECES[13:], *PIECES[:13]], strict=True)]
    lines = [f"{a}\n{b}" for a, b in zip(PIECES, [*PIECES[3:], *PIECES[:3]], strict=True)]
    return alone + framed + doubled + spaced + lines


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def made_from(metadata: dict[str, Any], architecture: str = "llama") -> GgufTokenizer:
    return tokenizer_from_gguf({"general.architecture": architecture, **metadata}, "some.gguf")


@pytest.fixture(scope="module")
def demo() -> GgufTokenizer:
    checkpoint = open_gguf(demo_path())
    return tokenizer_from_gguf(checkpoint.metadata, str(checkpoint.path))


@pytest.fixture(scope="module")
def demo_reference() -> Tokenizer:
    from transformers.integrations.ggml import convert_gguf_tokenizer

    return convert_gguf_tokenizer("llama", dict(demo_by_transformers()["tokenizer"]))[0]


def by_transformers(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def cut_by_digits(text: str) -> bool:
    """Whether the digits rule, which transformers leaves out, can change the ids.

    No merge of SmolLM2 crosses a digit, so it can where several blanks stand before one (the last
    of them goes with the digit or with the blanks), and with numerals that are no ASCII digits.
    """
    odd = any(char.isnumeric() and not char.isascii() for char in text)
    return odd or re.search(r"\s\s[0-9]", text) is not None


def test_demo_equals_transformers(demo: GgufTokenizer, demo_reference: Tokenizer) -> None:
    compared = [text for text in texts() if not cut_by_digits(text)]
    assert len(compared) >= 200
    for text in compared:
        assert ids(demo.tokenizer, text) == ids(demo_reference, text), repr(text)


@given(text=st.text(max_size=40) | st.lists(st.sampled_from(PIECES)).map("".join))
@settings(max_examples=300, deadline=None)
def test_demo_equals_transformers_with_the_models_rule(
    text: str, demo: GgufTokenizer, demo_reference: Tokenizer
) -> None:
    # transformers ignores tokenizer.ggml.pre; SmolLM2's own tokenizer.json has these two steps.
    demo_reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    assert ids(demo.tokenizer, text) == ids(demo_reference, text)


def test_demo_digits_are_cut_off_before_blanks(demo: GgufTokenizer) -> None:
    assert demo.tokenizer.encode("a:\n\n1. b  23").tokens == [
        "a", ":", "ĊĊ", "1", ".", "Ġb", "ĠĠ", "2", "3",
    ]  # fmt: skip


def test_demo_specials_are_single_ids(demo: GgufTokenizer) -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n"
    assert ids(demo.tokenizer, text)[0] == 1
    assert ids(demo.tokenizer, text)[-2] == 2
    assert demo.config["bos_token"] == "<|im_start|>"
    assert demo.config["eos_token"] == "<|im_end|>"
    assert demo.config["unk_token"] == "<|endoftext|>"
    assert demo.config["add_bos_token"] is False
    assert "SmolLM" in demo.chat_templates["default"]
    # The file says add_bos_token = false.
    assert demo.tokenizer.encode("Hi", add_special_tokens=True).ids == ids(demo.tokenizer, "Hi")


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_equals_transformers(architecture: str, tmp_path: Path) -> None:
    metadata = model_metadata(architecture) | bpe_metadata("qwen2")
    path = write_gguf(tmp_path / "q.gguf", metadata, model_tensors(vocab=420), architecture)
    reference = by_transformers(path)
    made = tokenizer_from_gguf(open_gguf(path).metadata, str(path)).tokenizer
    for text in texts():
        # transformers adds these three to any Qwen vocabulary.
        if "<|im_" not in text:
            assert ids(made, text) == reference.encode(text, add_special_tokens=False), repr(text)


def test_sentence_piece_equals_transformers(tmp_path: Path) -> None:
    metadata = model_metadata() | sentence_piece_metadata()
    path = write_gguf(tmp_path / "s.gguf", metadata, model_tensors(vocab=460))
    reference = by_transformers(path)
    made = tokenizer_from_gguf(open_gguf(path).metadata, str(path)).tokenizer
    compared = [*texts(), "<s>after</s> it", "<unk>", " leading", "trailing ", "▁", "a▁b"]
    for text in compared:
        found = ids(made, text)
        assert found == reference.encode(text, add_special_tokens=False), repr(text)
        assert made.decode(found) == reference.decode(found, skip_special_tokens=True)


def test_sentence_piece_equals_sentencepiece(tmp_path: Path) -> None:
    import sentencepiece

    reference = sentencepiece.SentencePieceProcessor(model_proto=sentence_piece_model())
    made = made_from(sentence_piece_metadata()).tokenizer
    for text in texts():
        if text and "<" not in text:
            assert ids(made, text) == reference.encode(text), repr(text)
    assert made.encode("a<sep>b").tokens == ["<s>", "▁a", "<sep>", "▁b"]


def test_sentence_piece_without_prefix_space() -> None:
    metadata = sentence_piece_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    made = made_from(metadata).tokenizer
    assert "".join(made.encode("the", add_special_tokens=False).tokens) == "the"
    assert made.decode(ids(made, " the")) == " the"


@pytest.mark.parametrize(
    ("kind", "flags", "bos", "eos"),
    [
        ("smollm", {}, False, False),
        ("smollm", {"add_bos_token": True}, True, False),
        ("smollm", {"add_eos_token": True}, False, True),
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("spm", {}, True, False),
        ("spm", {"add_bos_token": False}, False, False),
    ],
)
def test_flags_say_what_stands_around_a_text(
    kind: str, flags: dict[str, bool], bos: bool, eos: bool
) -> None:
    metadata = vocabulary_metadata(kind)
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in flags.items()}
    made = made_from(metadata)
    bare, framed = ids(made.tokenizer, "the"), made.tokenizer.encode("the").ids
    wanted = [metadata["tokenizer.ggml.bos_token_id"]] * bos + bare
    assert framed == wanted + [metadata["tokenizer.ggml.eos_token_id"]] * eos
    assert (made.config["add_bos_token"], made.config["add_eos_token"]) == (bos, eos)


@pytest.mark.parametrize("kind", ["llama-bpe", "smollm", "spm"])
def test_written_files_load_with_auto_tokenizer(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    metadata = model_metadata() | vocabulary_metadata(kind)
    metadata |= {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    path = write_gguf(tmp_path / "m.gguf", metadata, model_tensors(vocab=460))
    checkpoint = open_gguf(path)
    folder = tmp_path / "hf"
    written = write_tokenizer_files(checkpoint, folder)
    assert all(file.is_file() for file in written)
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    loaded = AutoTokenizer.from_pretrained(folder)
    made = tokenizer_from_gguf(checkpoint.metadata, str(path)).tokenizer
    for text in texts():
        assert loaded.encode(text) == made.encode(text).ids, repr(text)
    assert loaded.chat_template == {"default": "plain", "tool_use": "tools"}
    assert loaded.eos_token_id == metadata["tokenizer.ggml.eos_token_id"]


def test_llama3_rule_takes_three_digits_and_whole_words() -> None:
    metadata = dict(bpe_metadata("llama-bpe"))
    tokens = [*metadata["tokenizer.ggml.tokens"], "123", "Ġzebra"]
    types = [*metadata["tokenizer.ggml.token_type"], 1, 1]
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    made = made_from(metadata).tokenizer
    # Neither of the new tokens is the result of merges.
    assert made.encode("1234", add_special_tokens=False).tokens == ["123", "4"]
    assert made.encode(" zebra", add_special_tokens=False).tokens == ["Ġzebra"]


@pytest.mark.parametrize("pre", [None, "no-such"])
def test_unknown_splitting_rule_is_refused(pre: str | None) -> None:
    with pytest.raises(CheckpointError) as error:
        made_from(bpe_metadata(pre))
    message = str(error.value)
    assert "tokenizer.ggml.pre" in message
    assert "--tokenizer" in message
    assert "smollm" in message
    if pre:
        assert repr(pre) in message


def test_default_splitting_rule_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    made = made_from(bpe_metadata("default"), "qwen2").tokenizer
    assert "tokenizer.ggml.pre is 'default'" in caplog.text
    wanted = made_from(bpe_metadata("qwen2"), "qwen2").tokenizer
    for text in CORPUS:
        assert ids(made, text) == ids(wanted, text)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_rule_loses_nothing(name: str) -> None:
    made = made_from(bpe_metadata(name)).tokenizer
    for text in CORPUS:
        assert made.decode(ids(made, text)) == text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.tokens": []}, "holds no tokenizer"),
        ({"tokenizer.ggml.merges": []}, "without merges"),
        ({"tokenizer.ggml.merges": ["xx yy"]}, "the merge 'xx yy'"),
        ({"tokenizer.ggml.token_type": [1]}, "1 values for 420 tokens"),
        ({"tokenizer.ggml.eos_token_id": 420}, "eos_token_id is 420"),
    ],
)
def test_damage_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as error:
        made_from(bpe_metadata() | changes)
    assert said in str(error.value)
    assert "some.gguf" in str(error.value)
