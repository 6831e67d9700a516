"""What a checkpoint holds for its tokenizer, from whichever files it is in."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jaxllm.converters.checkpoint import Checkpoint, locate
from jaxllm.engine.chat_template import named_templates, read_templates

logger = logging.getLogger(__name__)

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Vocabularies that transformers knows how to convert.
_OTHER_FORMATS = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "tiktoken.model",
)
_WAY_OUT = "Give another folder or hub id with --tokenizer, or --skip-tokenizer-init."


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer, ready to use, and what stands beside it.

    Attributes:
        special_tokens: bos_token and the like, by their names in tokenizer_config.json.
        chat_templates: by name; the main one is "default".
        generation_config: generation_config.json's content.
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]
    generation_config: Mapping[str, Any] = field(default_factory=dict)


def read_tokenizer_files(
    model: str | Path | Checkpoint, *, revision: str | None = None
) -> TokenizerFiles:
    """The tokenizer of a folder, a .gguf file, "demo", a hub id or an open checkpoint.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    if not isinstance(model, str | Path):
        # A GGUF checkpoint has it all in its metadata; a folder is read like any other.
        return _from_checkpoint(model)
    path = locate(str(model), revision=revision, weights=False)
    if path.is_file() or (not _has_vocabulary(path) and any(path.glob("*.gguf"))):
        from jaxllm.converters.gguf_checkpoint import open_gguf

        return _from_checkpoint(open_gguf(path))
    return _from_folder(path)


def _from_checkpoint(checkpoint: Checkpoint) -> TokenizerFiles:
    # Imported here, since other formats need no gguf package.
    from jaxllm.converters.gguf_checkpoint import GgufCheckpoint
    from jaxllm.converters.gguf_tokenizer import tokenizer_from_gguf

    if not isinstance(checkpoint, GgufCheckpoint):
        return read_tokenizer_files(checkpoint.path)
    made = tokenizer_from_gguf(checkpoint.metadata, str(checkpoint.path))
    return TokenizerFiles(
        made.tokenizer,
        {name: made.config[name] for name in NAMED_TOKENS if made.config.get(name)},
        made.chat_templates,
        checkpoint.generation_config,
    )


def _from_folder(folder: Path) -> TokenizerFiles:
    config = _read_json(folder / "tokenizer_config.json")
    generation_config = _read_json(folder / "generation_config.json")
    if not (folder / "tokenizer.json").is_file():
        return _through_transformers(folder, generation_config)
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the package raises bare Exceptions
        raise ValueError(f"{folder / 'tokenizer.json'} is damaged: {error}. {_WAY_OUT}") from None
    # Some files switch these on for training; a prompt is never cut or padded.
    backend.no_truncation()
    backend.no_padding()
    special = _special_tokens(folder, config)
    extra = _extra_special_tokens(config)
    named = {name: token.content for name, token in special.items()}
    if isinstance(config.get("extra_special_tokens"), Mapping):
        named |= {name: _added(token).content for name, token in extra.items()}
    # add_bos_token and add_eos_token are not looked at: where there is a tokenizer.json, its
    # post-processor decides (transformers 5 does the same).
    _add_tokens(backend, config, [*special.values(), *extra.values()])
    return TokenizerFiles(backend, named, read_templates(folder, config), generation_config)


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """The named special tokens; old checkpoints have them in a file of their own."""
    older = _read_json(folder / "special_tokens_map.json")
    found = {name: config.get(name, older.get(name)) for name in NAMED_TOKENS}
    return {name: _added(token) for name, token in found.items() if token}


def _extra_special_tokens(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Unnamed special tokens, or named ones beyond the usual."""
    extra: dict[str, AddedToken] = {}
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = config.get(key) or []
        named = tokens.items() if isinstance(tokens, Mapping) else ((str(t), t) for t in tokens)
        extra |= {name: _added(token) for name, token in named}
    return extra


def _added(token: Any) -> AddedToken:
    if isinstance(token, AddedToken):
        return token
    if isinstance(token, str):
        return AddedToken(token, normalized=False, special=True)
    options = ("single_word", "lstrip", "rstrip", "normalized")
    return AddedToken(
        token["content"], special=True, **{key: token[key] for key in options if key in token}
    )


def _add_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: list[AddedToken]
) -> None:
    """Makes the backend know every token that tokenizer_config.json lists, special or not."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda i: int(i[0]))
    for _, token in listed:
        if token["content"] in known:
            continue
        if token.get("special"):
            backend.add_special_tokens([_added(token)])
        else:
            options = {key: value for key, value in token.items() if key != "content"}
            backend.add_tokens([AddedToken(token["content"], **options)])
    backend.add_special_tokens(special)


def _through_transformers(folder: Path, generation_config: Mapping[str, Any]) -> TokenizerFiles:
    """SentencePiece and other vocabularies, converted by transformers."""
    if not _has_vocabulary(folder):
        raise ValueError(f"no tokenizer in {folder} (no tokenizer.json). {_WAY_OUT}")
    # Imported here: it takes seconds, which tokenizer.json and GGUF need not wait for.
    from transformers import AutoTokenizer

    try:
        made = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        backend = made.backend_tokenizer
    except Exception as error:
        raise ValueError(f"cannot convert the tokenizer in {folder}: {error} {_WAY_OUT}") from error
    backend.no_truncation()
    backend.no_padding()
    templates = named_templates(made.chat_template, str(folder))
    return TokenizerFiles(backend, dict(made.special_tokens_map), templates, generation_config)


def _has_vocabulary(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", *_OTHER_FORMATS))


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {file}: {error}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object.")
    return content
