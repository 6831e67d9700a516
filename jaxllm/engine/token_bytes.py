"""The bytes that each token stands for, where these do not depend on its neighbours."""

import json
import re
from typing import Any

from tokenizers import Tokenizer

_SPACE = "▁"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: a printable byte is itself, the others follow from U+0100 on.

    Source: https://github.com/openai/gpt-2/blob/master/src/encoder.py, bytes_to_unicode.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(byte): byte for byte in printable}
    return stand_ins | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_ALPHABET = _byte_level_alphabet()


class TokenBytes:
    """Token id to bytes, as the tokenizer's decoder makes them.

    Attributes:
        additive: whether a text's bytes are its tokens' bytes one after the other (but for
            `strip_spaces`), as with all byte-level and SentencePiece tokenizers.
        strip_spaces: how many spaces at most are taken from the start of a decoded text.
        byte_fallback: whether some tokens are single bytes beside others that are text.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._cache: dict[int, bytes] = {}
        self._byte_level = False
        self._space = False
        self.byte_fallback = False
        self.strip_spaces = 0
        self.additive = self._read_decoder(_steps(backend))

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; none for an id that there is not."""
        known = self._cache.get(token_id)
        if known is None:
            known = self._cache[token_id] = self._bytes(token_id)
        return known

    def _bytes(self, token_id: int) -> bytes:
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if not self.additive:
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        if self._byte_level:
            values = [_ALPHABET.get(char) for char in piece]
            return piece.encode() if None in values else bytes(v for v in values if v is not None)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return (piece.replace(_SPACE, " ") if self._space else piece).encode()

    def _read_decoder(self, steps: list[dict[str, Any]]) -> bool:
        """Whether the decoder is one of those that need no context."""
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            self._byte_level = True
            return True
        for step in steps:
            if step["type"] == "Replace":
                self._space = True
                if step["pattern"] != {"String": _SPACE} or step["content"] != " ":
                    return False
            elif step["type"] == "ByteFallback":
                self.byte_fallback = True
            elif step["type"] == "Strip":
                # Before Fuse it would act on every token.
                if step["content"] != " " or step["stop"] or "Fuse" not in kinds:
                    return False
                if kinds.index("Fuse") > kinds.index("Strip"):
                    return False
                self.strip_spaces = step["start"]
            elif step["type"] != "Fuse":
                return False
        return self._space


def _steps(backend: Tokenizer) -> list[dict[str, Any]]:
    """The decoder's description, flattened."""
    if backend.decoder is None:
        return [{"type": "none"}]
    decoder = json.loads(backend.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
