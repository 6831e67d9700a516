"""The tokenizer inside a GGUF file, rebuilt as a tokenizers.Tokenizer.

Two kinds: byte-level BPE ("gpt2": tokens, merges, and the name of a word-splitting rule) and
SentencePiece ("llama": tokens with scores, bytes as fallback). Everything else that a
tokenizer_config.json would say (special tokens, BOS and EOS flags, chat templates) is in the
metadata too.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.gguf_checkpoint import GgufCheckpoint
from jaxllm.converters.gguf_pre_tokenizers import DEFAULTS, PRE_TOKENIZERS, PreTokenizer

logger = logging.getLogger(__name__)

_WAY_OUT = "Give the original model's tokenizer with --tokenizer FOLDER."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SPACE = "▁"


@dataclass(frozen=True)
class GgufTokenizer:
    """A rebuilt tokenizer.

    Attributes:
        config: tokenizer_config.json's content, without the chat template.
        chat_templates: by name; the main one is "default".
    """

    tokenizer: Tokenizer
    config: dict[str, Any]
    chat_templates: dict[str, str]


@dataclass(frozen=True)
class _Vocabulary:
    """The tokenizer's part of the metadata, checked. where: the file, for messages."""

    metadata: Mapping[str, Any]
    where: str
    tokens: list[str]
    types: list[int]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def named(self, name: str) -> str | None:
        """The token that is bos, eos, unk or pad."""
        number = self.get(f"{_NAMED[name]}_token_id")
        return None if number is None else self.tokens[number]

    def merges(self) -> list[tuple[str, str]] | None:
        lines = self.get("merges")
        if not lines:
            return None
        pairs = [tuple(line.split(" ", 1)) for line in lines]
        known = set(self.tokens)
        for pair in pairs:
            if len(pair) != 2 or not {*pair, "".join(pair)} <= known:
                raise CheckpointError(
                    f"{self.where} is damaged: the merge {' '.join(pair)!r} "
                    f"(tokenizer.ggml.merges) is not between two tokens."
                )
        return pairs  # type: ignore[return-value]


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str) -> GgufTokenizer:
    """Rebuilds the tokenizer from a file's metadata.

    Raises:
        CheckpointError: there is none, it is damaged, or of a kind or with a splitting rule that
            is not known; the message says what can be done.
    """
    vocabulary = _read_vocabulary(metadata, where)
    model = vocabulary.get("model")
    if model == "gpt2":
        rule = _splitting_rule(vocabulary)
        tokenizer, add_bos = _byte_level(vocabulary, rule), rule.add_bos
    elif model == "llama":
        tokenizer, add_bos = _sentence_piece(vocabulary), True
    else:
        raise CheckpointError(
            f"{where} has a tokenizer of the kind {model!r} (tokenizer.ggml.model), which is not "
            f"supported; there are gpt2 and llama. {_WAY_OUT}"
        )
    _add_special_tokens(tokenizer, vocabulary)
    flags = {
        "add_bos_token": bool(vocabulary.get("add_bos_token", add_bos)),
        "add_eos_token": bool(vocabulary.get("add_eos_token", False)),
    }
    for flag, name in (("add_bos_token", "bos"), ("add_eos_token", "eos")):
        flags[flag] = flags[flag] and vocabulary.named(name) is not None
    set_bos_eos(
        tokenizer,
        vocabulary.named("bos") if flags["add_bos_token"] else None,
        vocabulary.named("eos") if flags["add_eos_token"] else None,
    )
    return GgufTokenizer(tokenizer, _config(vocabulary, flags), _chat_templates(metadata))


def write_tokenizer_files(checkpoint: GgufCheckpoint, folder: Path) -> list[Path]:
    """Writes tokenizer.json, tokenizer_config.json and the chat templates, as AutoTokenizer reads.

    Returns:
        The files written.
    """
    made = tokenizer_from_gguf(checkpoint.metadata, str(checkpoint.path))
    files = {
        folder / "tokenizer.json": made.tokenizer.to_str(pretty=True),
        folder / "tokenizer_config.json": json.dumps(made.config, indent=2, ensure_ascii=False),
    }
    for name, template in made.chat_templates.items():
        file = f"additional_chat_templates/{name}.jinja" if name != "default" else None
        files[folder / (file or "chat_template.jinja")] = template
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return list(files)


def set_bos_eos(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes `tokenizer` put these tokens around a text, and no others."""
    single = ([bos] if bos else []) + ["$A"] + ([eos] if eos else [])
    names = {token: tokenizer.token_to_id(token) for token in (bos, eos) if token}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *(f"{part}:1" for part in ["$B" if p == "$A" else p for p in single])],
        special_tokens=list(names.items()),
    )


def _read_vocabulary(metadata: Mapping[str, Any], where: str) -> _Vocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise CheckpointError(f"{where} holds no tokenizer (tokenizer.ggml.tokens). {_WAY_OUT}")
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        types = [1] * len(tokens)
    for key, values in (("token_type", types), ("scores", metadata.get("tokenizer.ggml.scores"))):
        if values is not None and len(values) != len(tokens):
            raise CheckpointError(
                f"{where} is damaged: tokenizer.ggml.{key} has {len(values)} values for "
                f"{len(tokens)} tokens."
            )
    for key in _NAMED.values():
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and not 0 <= number < len(tokens):
            raise CheckpointError(
                f"{where} is damaged: tokenizer.ggml.{key}_token_id is {number}, and there are "
                f"{len(tokens)} tokens."
            )
    if len(set(tokens)) < len(tokens):
        logger.warning("%s: %d tokens are there twice", where, len(tokens) - len(set(tokens)))
    return _Vocabulary(metadata, where, tokens, types)


def _splitting_rule(vocabulary: _Vocabulary) -> PreTokenizer:
    name = vocabulary.get("pre")
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    architecture = vocabulary.metadata.get("general.architecture")
    if name == "default" and architecture in DEFAULTS:
        logger.warning(
            "%s does not say how its tokenizer splits words (tokenizer.ggml.pre is 'default'): "
            "taking the usual rule for %s. If the output is poor, that is why. %s",
            vocabulary.where,
            architecture,
            _WAY_OUT,
        )
        return DEFAULTS[architecture]
    said = "does not say" if name is None else f"says with the unknown name {name!r}"
    raise CheckpointError(
        f"{vocabulary.where} {said} how its tokenizer splits words (tokenizer.ggml.pre), and a "
        f"wrong guess would quietly give worse text. Known: {', '.join(PRE_TOKENIZERS)}. {_WAY_OUT}"
    )


def _byte_level(vocabulary: _Vocabulary, rule: PreTokenizer) -> Tokenizer:
    merges = vocabulary.merges()
    if merges is None:
        raise CheckpointError(
            f"{vocabulary.where} has a BPE tokenizer without merges (tokenizer.ggml.merges). "
            f"{_WAY_OUT}"
        )
    unknown = vocabulary.named("unk")
    tokenizer = Tokenizer(
        BPE(
            {token: number for number, token in enumerate(vocabulary.tokens)},
            merges,
            unk_token=unknown,
            fuse_unk=unknown is not None,
            ignore_merges=rule.ignore_merges,
        )
    )
    if (normalizer := rule.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = rule.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(vocabulary: _Vocabulary) -> Tokenizer:
    """BPE whose merges are recovered from the scores, with spaces written as ▁."""
    tokenizer = Tokenizer(
        BPE(
            {token: number for number, token in enumerate(vocabulary.tokens)},
            vocabulary.merges() or _merges_from_scores(vocabulary),
            unk_token=vocabulary.named("unk"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(vocabulary.get("add_space_prefix", True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE)] * prefix + [normalizers.Replace(" ", _SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)] * prefix
    )
    return tokenizer


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """All ways to make a token of two, best token first; among its ways, best parts first.

    SentencePiece merges the neighbours whose union scores best, which is the order that BPE takes
    from the list.
    """
    values = vocabulary.get("scores")
    if values is None:
        raise CheckpointError(
            f"{vocabulary.where} has a SentencePiece tokenizer with neither scores nor merges. "
            f"{_WAY_OUT}"
        )
    scores = dict(zip(vocabulary.tokens, values, strict=True))
    found: list[tuple[float, tuple[str, str]]] = []
    for token, score in scores.items():
        ways = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        ways = [way for way in ways if way[0] in scores and way[1] in scores]
        ways.sort(key=lambda way: (scores[way[0]], scores[way[1]]), reverse=True)
        found += [(score, way) for way in ways]
    found.sort(key=lambda item: item[0], reverse=True)
    return [way for _, way in found]


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Makes control and user-defined tokens single ids wherever they stand in a text."""
    named = {vocabulary.named(name) for name in _NAMED}
    special, plain = [], []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if token and (kind in (_CONTROL, _UNKNOWN) or token in named):
            special.append(AddedToken(token, normalized=False, special=True))
        elif token and kind == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _config(vocabulary: _Vocabulary, flags: dict[str, bool]) -> dict[str, Any]:
    architecture = vocabulary.metadata.get("general.architecture")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **flags}
    for name in _NAMED:
        config[f"{name}_token"] = vocabulary.named(name)
    config["clean_up_tokenization_spaces"] = False
    context = vocabulary.metadata.get(f"{architecture}.context_length")
    if context is not None:
        config["model_max_length"] = context
    return config


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    return {
        key.removeprefix(prefix).lstrip(".") or "default": value
        for key, value in metadata.items()
        if (key == prefix or key.startswith(prefix + ".")) and isinstance(value, str)
    }
