"""Tokenizers of any checkpoint: ids, BOS, special tokens and chat templates as transformers'."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.config import EngineConfig
from jaxllm.converters.checkpoint import demo_path, open_checkpoint
from jaxllm.engine.tokenizer import Tokenizer
from tests.converters.gguf_files import sentence_piece_model
from tests.engine.tokenizer_folders import CHATML, CORPUS, WITH_BOS, byte_level, save

pytestmark = pytest.mark.filterwarnings("ignore")

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <s> & 'you' \n"},
    {"role": "assistant", "content": " 世界 </s>"},
]
TEXTS = [*CORPUS, "", " ", "<s>", "<s>the", "the<s>", "a</s>b", "\r\n\t  x", "<|im_start|>user\nHi"]


def auto(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load("demo")


class TestLoading:
    def test_every_way_to_name_the_demo(self, demo: Tokenizer) -> None:
        path = demo_path()
        for named in (path, str(path), path.parent, open_checkpoint("demo"), EngineConfig()):
            loaded = Tokenizer.load(named)
            assert loaded.encode(CORPUS[1]) == demo.encode(CORPUS[1])
            assert loaded.eos_token_ids == {2}
            assert loaded.vocab_size == 49152

    def test_a_tokenizer_of_its_own_goes_first(self, tmp_path: Path) -> None:
        folder = save(tmp_path, byte_level())
        config = EngineConfig(tokenizer=str(folder), chat_template="{{ messages }}")
        loaded = Tokenizer.load(config)
        assert loaded.vocab_size == 400
        assert loaded.chat_templates == {"default": "{{ messages }}"}

    def test_needs_neither_transformers_nor_torch(self) -> None:
        script = (
            "import sys\n"
            "from jaxllm.engine.tokenizer import Tokenizer\n"
            "t = Tokenizer.load('demo')\n"
            "t.apply_chat_template([{'role': 'user', 'content': 'Hi'}])\n"
            "print({'transformers', 'torch', 'jax'} & set(sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
        assert done.stdout.decode().strip() == "set()"

    def test_sentence_piece_model_alone(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.model").write_bytes(sentence_piece_model())
        config = {"tokenizer_class": "LlamaTokenizer", "chat_template": CHATML}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        loaded, reference = Tokenizer.load(tmp_path), auto(tmp_path)
        for text in TEXTS[:-8]:
            ids = loaded.encode(text)
            assert ids == reference.encode(text), repr(text)
            assert loaded.decode(ids, skip_special_tokens=True) == reference.decode(
                ids, skip_special_tokens=True
            )
        assert loaded.special_tokens["eos_token"] == "</s>"
        assert loaded.apply_chat_template(MESSAGES, tokenize=False) == (
            reference.apply_chat_template(MESSAGES, tokenize=False)
        )

    @pytest.mark.parametrize(
        ("files", "said"),
        [
            ({}, "no tokenizer"),
            ({"tokenizer.json": "{"}, "is damaged"),
            ({"tokenizer.json": "{}", "tokenizer_config.json": "["}, "cannot read"),
            ({"vocab.json": "nonsense"}, "cannot convert"),
        ],
    )
    def test_what_is_wrong_is_named(self, files: dict[str, str], said: str, tmp_path: Path) -> None:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=said) as error:
            Tokenizer.load(tmp_path)
        assert str(tmp_path) in str(error.value)

    def test_absent(self) -> None:
        with pytest.raises(ValueError, match="no/such"):
            Tokenizer.load("./no/such")


class TestIds:
    @pytest.mark.parametrize("bos", [False, True])
    @pytest.mark.parametrize(
        "config", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}]
    )
    def test_equal_to_transformers(self, bos: bool, config: dict[str, Any], tmp_path: Path) -> None:
        folder = save(tmp_path, byte_level(bos=bos), **config)
        loaded, reference = Tokenizer.load(folder), auto(folder)
        texts = [text for text in TEXTS if not text.startswith("<s>")]
        for special in (True, False):
            wanted = [reference.encode(text, add_special_tokens=special) for text in texts]
            assert loaded.encode_batch(texts, special) == wanted
        assert loaded.adds_bos == bos
        for ids in loaded.encode_batch(texts):
            for skip in (True, False):
                assert loaded.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)

    def test_text_with_bos_gets_no_second(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        loaded = Tokenizer.load(save(tmp_path, byte_level(bos=True)))
        with caplog.at_level(logging.WARNING):
            assert loaded.encode("<s>the") == loaded.encode("the")
            assert loaded.encode("<s>the") == loaded.encode("the")
        assert len(caplog.records) == 1
        assert loaded.encode("the")[0] == loaded.bos_token_id == 0
        assert loaded.encode("<s>the", add_special_tokens=False) == loaded.encode("the")

    def test_special_tokens_from_every_place(self, tmp_path: Path) -> None:
        backend = byte_level()
        backend.add_tokens(["<plain>"])
        folder = save(
            tmp_path,
            backend,
            tokenizer_class="TokenizersBackend",
            additional_special_tokens=["<|im_end|>", "<new>"],
            extra_special_tokens=["<extra>"],
            added_tokens_decoder={"403": {"content": "<listed>", "special": False}},
        )
        loaded = Tokenizer.load(folder)
        text = "the<plain><|im_end|><new><extra><listed>"
        ids = loaded.encode(text)
        assert [loaded.id_to_piece(i) for i in ids] == [
            "the", "<plain>", "<|im_end|>", "<new>", "<extra>", "<listed>",
        ]  # fmt: skip
        assert loaded.decode(ids) == text
        assert loaded.decode(ids, skip_special_tokens=True) == "the<plain><listed>"

    def test_named_extra_tokens_reach_the_template(self, tmp_path: Path) -> None:
        folder = save(
            tmp_path,
            byte_level(),
            extra_special_tokens={"image_token": "<pad>"},
            chat_template="{{ image_token }}{{ eos_token }}",
        )
        assert Tokenizer.load(folder).apply_chat_template(MESSAGES, tokenize=False) == "<pad></s>"

    def test_prompts_are_never_cut_or_padded(self, tmp_path: Path) -> None:
        backend = byte_level()
        backend.enable_truncation(4)
        backend.enable_padding(length=64)
        loaded = Tokenizer.load(save(tmp_path, backend))
        assert len(loaded.encode("the " * 50)) == len(byte_level().encode("the " * 50).ids)

    def test_generation_config_says_what_ends_a_text(self, tmp_path: Path) -> None:
        folder = save(tmp_path, byte_level())
        assert Tokenizer.load(folder).eos_token_ids == {1}
        (folder / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
        assert Tokenizer.load(folder).eos_token_ids == {1, 5}

    def test_lone_surrogates_are_refused(self, demo: Tokenizer) -> None:
        with pytest.raises(ValueError, match="no valid Unicode"):
            demo.encode("a\ud800b")

    @given(ids=st.lists(st.integers(0, 49160)))
    @settings(max_examples=300, deadline=None)
    def test_bytes_of_tokens_make_the_text(self, ids: list[int], demo: Tokenizer) -> None:
        joined = b"".join(demo.bytes[i] for i in ids)
        assert joined.decode("utf-8", errors="replace") == demo.decode(ids)

    def test_text_of_a_token_keeps_its_space(self, demo: Tokenizer) -> None:
        ids = demo.encode(" the 世")
        assert demo.token_text(ids[0]) == " the"
        assert demo.id_to_piece(ids[0]) == "Ġthe"
        assert demo.token_text(10**6) == ""


class TestTemplateSources:
    def test_named_templates(self, tmp_path: Path) -> None:
        templates = [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "tools"},
            {"name": "rag", "template": "documents"},
        ]
        loaded = Tokenizer.load(save(tmp_path, byte_level(), chat_template=templates))

        def text(**options: Any) -> str:
            return loaded.apply_chat_template(MESSAGES, tokenize=False, **options)

        assert text() == "plain"
        assert text(tools=[{"type": "function"}]) == "tools"
        assert text(chat_template="rag") == "documents"
        assert text(chat_template="{{ 1 + 1 }}") == "2"

    def test_file_goes_before_config(self, tmp_path: Path) -> None:
        folder = save(tmp_path, byte_level(), chat_template="from config")
        (folder / "chat_template.jinja").write_text("from file")
        more = folder / "additional_chat_templates"
        more.mkdir()
        (more / "tool_use.jinja").write_text("tools")
        assert Tokenizer.load(folder).chat_templates == {
            "default": "from file",
            "tool_use": "tools",
        }

    def test_old_file(self, tmp_path: Path) -> None:
        folder = save(tmp_path, byte_level())
        (folder / "chat_template.json").write_text('{"chat_template": "old"}')
        assert Tokenizer.load(folder).chat_templates == {"default": "old"}

    def test_none_names_the_flag(self, tmp_path: Path) -> None:
        loaded = Tokenizer.load(save(tmp_path, byte_level()))
        with pytest.raises(ValueError, match="--chat-template"):
            loaded.apply_chat_template(MESSAGES)
        assert loaded.encode("the")

    def test_no_default_names_the_choices(self, tmp_path: Path) -> None:
        templates = [{"name": "b", "template": "1"}, {"name": "a", "template": "2"}]
        loaded = Tokenizer.load(save(tmp_path, byte_level(), chat_template=templates))
        with pytest.raises(ValueError, match="a, b"):
            loaded.apply_chat_template(MESSAGES)

    def test_option_is_a_file_a_template_or_a_name(self, tmp_path: Path) -> None:
        templates = [{"name": "default", "template": "1"}, {"name": "other", "template": "2"}]
        folder = save(tmp_path, byte_level(), chat_template=templates)
        file = tmp_path / "mine.jinja"
        file.write_text("from my file")
        for option, wanted in (
            (str(file), "from my file"),
            ("{{ messages|length }}", "3"),
            ("other", "2"),
        ):
            loaded = Tokenizer.load(folder, chat_template=option)
            assert loaded.apply_chat_template(MESSAGES, tokenize=False) == wanted
        with pytest.raises(ValueError, match=r"--chat-template 'absent\.jinja'"):
            Tokenizer.load(folder, chat_template="absent.jinja")

    def test_wrong_form(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="chat_template is neither"):
            Tokenizer.load(save(tmp_path, byte_level(), chat_template=[1, 2]))


class TestChat:
    def test_exactly_one_bos(self, tmp_path: Path) -> None:
        loaded = Tokenizer.load(save(tmp_path, byte_level(bos=True), chat_template=WITH_BOS))
        messages = [{"role": "user", "content": "the"}]
        ids = loaded.apply_chat_template(messages)
        assert ids[0] == 0
        assert ids.count(0) == 1
        # The same prompt as text, through completions.
        assert loaded.encode(loaded.apply_chat_template(messages, tokenize=False)) == ids

    def test_demo_equals_transformers(self, demo: Tokenizer, tmp_path: Path) -> None:
        from jaxllm.converters.gguf_checkpoint import open_gguf
        from jaxllm.converters.gguf_tokenizer import write_tokenizer_files

        write_tokenizer_files(open_gguf(demo_path()), tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        reference = auto(tmp_path)
        choices: list[dict[str, Any]] = [
            {},
            {"add_generation_prompt": True},
            {"continue_final_message": True},
        ]
        for options in choices:
            wanted = reference.apply_chat_template(MESSAGES, return_dict=False, **options)
            assert demo.apply_chat_template(MESSAGES, **options) == wanted

    def test_no_messages(self, demo: Tokenizer) -> None:
        with pytest.raises(ValueError, match="must not be empty"):
            demo.apply_chat_template([])
