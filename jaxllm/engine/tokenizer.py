"""Text to token ids and back, and chat messages to a prompt, for any checkpoint.

Built on the tokenizers package alone: importing transformers takes seconds, and it is only needed
for folders without a tokenizer.json.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import tokenizers

from jaxllm.config import EngineConfig
from jaxllm.converters.checkpoint import Checkpoint
from jaxllm.engine.chat_messages import normalize_messages
from jaxllm.engine.chat_template import choose_template, render, template_from_option
from jaxllm.engine.token_bytes import TokenBytes
from jaxllm.engine.tokenizer_files import TokenizerFiles, read_tokenizer_files

__all__ = ["Tokenizer", "normalize_messages"]

logger = logging.getLogger(__name__)


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Attributes:
        backend: the tokenizers.Tokenizer, special tokens and post-processor set.
        bytes: the bytes of each token.
        special_tokens: bos_token, eos_token and the like, as chat templates get them.
        chat_templates: by name; the main one is "default".
        eos_token_ids: whatever ends a text, by generation_config.json or else the tokenizer.
    """

    def __init__(self, files: TokenizerFiles, *, chat_template: str | None = None) -> None:
        self.backend: tokenizers.Tokenizer = files.backend
        self.bytes = TokenBytes(files.backend)
        self.special_tokens = files.special_tokens
        self.chat_templates = files.chat_templates
        if chat_template is not None:
            wanted = chat_template
            if wanted not in files.chat_templates:
                wanted = template_from_option(chat_template)
            self.chat_templates = {"default": files.chat_templates.get(wanted, wanted)}
        self.eos_token_ids = self._eos_token_ids(files.generation_config)
        self._warned_of_bos = False

    @classmethod
    def load(
        cls,
        model: "str | Path | Checkpoint | EngineConfig",
        *,
        revision: str | None = None,
        chat_template: str | None = None,
    ) -> "Tokenizer":
        """Loads the tokenizer of a folder, a .gguf file, "demo", a hub id or an open checkpoint.

        Args:
            model: an EngineConfig stands for its tokenizer (or model), revision and template.
            chat_template: instead of the checkpoint's: a file, a template, or the name of one of
                its own (--chat-template).

        Raises:
            ValueError: there is no tokenizer, or it is damaged; the message says what can be done.
        """
        if isinstance(model, EngineConfig):
            # A tokenizer named for itself has revisions of its own.
            revision = model.revision if model.tokenizer is None else None
            chat_template = model.chat_template
            model = model.tokenizer or model.model
        return cls(read_tokenizer_files(model, revision=revision), chat_template=chat_template)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; the model's own vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that skip_special_tokens hides."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    @cached_property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    @cached_property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    @cached_property
    def adds_bos(self) -> bool:
        """Whether `encode` begins a text with BOS."""
        ids = self.backend.encode("", add_special_tokens=True).ids
        return bool(ids) and ids[0] == self.bos_token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's ids. A text that already begins with BOS does not get a second one.

        Raises:
            ValueError: the text is no valid Unicode (lone surrogates).
        """
        # Not as a batch of one: that starts the package's threads, which do not survive a fork.
        return self._encode(
            lambda: [self.backend.encode(text, add_special_tokens=add_special_tokens)],
            add_special_tokens,
        )[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """The ids of several texts, worked on in parallel."""
        return self._encode(
            lambda: self.backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            ),
            add_special_tokens,
        )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The ids' text; what is no valid UTF-8 becomes U+FFFD, ids out of range are nothing."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_batch(
        self, batch: Sequence[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        """The texts of several sequences of ids."""
        return self.backend.decode_batch(
            [list(ids) for ids in batch], skip_special_tokens=skip_special_tokens
        )

    def id_to_piece(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it ("Ġthe", "▁the"), None if there is none."""
        return self.backend.id_to_token(token_id)

    def piece_to_id(self, piece: str) -> int | None:
        return self.backend.token_to_id(piece)

    def token_text(self, token_id: int) -> str:
        """The token's own text, with its leading space; U+FFFD for parts of characters."""
        return self.bytes[token_id].decode("utf-8", errors="replace")

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: Literal[True] = True,
        **options: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: Literal[False], **options: Any
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int] | str:
        """The prompt of a chat: its ids, or its text if not `tokenize`.

        The template writes BOS if the model wants it, so none is added. The messages are taken as
        they are: see `normalize_messages`.

        Args:
            chat_template: the name of one of the model's templates, or a template.
            variables: further variables of the template (chat_template_kwargs).

        Raises:
            ValueError: there is no template (the message names --chat-template), no message, or
                the template refuses them.
        """
        if not messages:
            raise ValueError("messages must not be empty.")
        template = choose_template(self.chat_templates, chat_template, tools)
        text = render(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **{**self.special_tokens, "tools": tools, "documents": documents, **variables},
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _encode(
        self, run: Callable[[], list[tokenizers.Encoding]], add_special_tokens: bool
    ) -> list[list[int]]:
        try:
            batch = [encoding.ids for encoding in run()]
        except (TypeError, UnicodeError) as error:
            raise ValueError(f"the prompt is no valid Unicode text: {error}.") from None
        if add_special_tokens and self.adds_bos:
            batch = [self._with_one_bos(ids) for ids in batch]
        return batch

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        bos = self.bos_token_id
        if ids[:2] != [bos, bos]:
            return ids
        if not self._warned_of_bos:
            self._warned_of_bos = True
            logger.warning(
                "a prompt begins with %s, which the tokenizer adds by itself: taking only one "
                "(said once)",
                self.special_tokens.get("bos_token"),
            )
        return ids[1:]

    def _eos_token_ids(self, generation_config: Mapping[str, Any]) -> frozenset[int]:
        stated = generation_config.get("eos_token_id")
        ids: Iterable[Any] = stated if isinstance(stated, list) else [stated]
        return frozenset(number for number in (*ids, self.eos_token_id) if isinstance(number, int))
