"""Token ids to text as they come: whole characters only, stop strings cut off."""

import codecs
from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"
_CONTEXT = 6  # prompt tokens that tell a decoder that this is no beginning


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Byte tokens that form no character become U+FFFD one by one, as tokenizers' ByteFallback."""
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("jaxllm.replace_each_byte", _replace_each_byte)
_incremental_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one sequence's output tokens.

    The text given out is what `tokenizer.decode` makes of the output ids (at an end within a
    character, and for invalid bytes, with U+FFFD), up to a stop string. It comes with the token
    that completes it: only unfinished characters and what may become a stop string are held back.

    Attributes:
        text: all text given out so far.
        stop: the stop string that ended the text, None if none has.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self.text = ""
        self.stop: str | None = None
        self._stops = params.stop_strings
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""  # the end of the text so far that may be the beginning of a stop string
        self._skip = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        if tokenizer.bytes.additive:
            self._decoder = _AdditiveDecoder(tokenizer, prompt_token_ids, self._skip)
        else:
            self._decoder = _ContextDecoder(tokenizer, prompt_token_ids, self._skip)

    def push(
        self, new_ids: Sequence[int], *, ends_with_stop_token: bool = False
    ) -> tuple[str, str | None]:
        """Takes further output ids.

        Args:
            ends_with_stop_token: the last of them is the stop token (or eos) that ended the
                output: its text is left out, unless include_stop_str_in_output.

        Returns:
            The new text, and the stop string if one is now complete; ids after it are ignored.
        """
        if self.stop is not None:
            return "", self.stop
        if ends_with_stop_token and not self._include_stop:
            new_ids = new_ids[:-1]
        if not self._stops:
            self._num_tokens += len(new_ids)
            delta = self._decoder.decode(new_ids)
        else:
            delta = ""
            # Token by token, so that the result does not depend on how many come at once.
            for token_id in new_ids:
                self._num_tokens += 1
                delta += self._until_stop(self._decoder.decode((token_id,)))
                if self.stop is not None:
                    break
        self.text += delta
        return delta, self.stop

    def finish(self) -> str:
        """The output has ended: the text that was held back."""
        if self.stop is not None:
            return ""
        rest = self._decoder.finish()
        if self._stops:
            rest = self._until_stop(rest)
            if self.stop is None and not self._include_stop:
                rest, self._held = rest + self._held, ""
        self.text += rest
        return rest

    def _until_stop(self, new: str) -> str:
        """What can be given out of the held text and `new`; sets `stop`."""
        if self._num_tokens <= self._min_tokens:
            return new
        text = self._held + new
        given = len(self._held) if self._include_stop else 0
        # The one completed first, as if the text came character by character.
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if matches:
            end, start, self.stop = min(matches)
            self._held = ""
            return text[given:end] if self._include_stop else text[:start]
        held = self._possible_stop(text)
        self._held = text[len(text) - held :]
        return text[given:] if self._include_stop else text[: len(text) - held]

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class _AdditiveDecoder:
    """For tokenizers whose text is their tokens' bytes in a row: no token is decoded twice.

    One text differs from `tokenizer.decode`'s: where byte tokens of a SentencePiece model form
    characters and then something invalid, decode makes U+FFFD of them all, but the characters
    have been given out by then.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip: frozenset[int]) -> None:
        self._bytes = tokenizer.bytes
        self._skip = skip
        errors = "jaxllm.replace_each_byte" if self._bytes.byte_fallback else "replace"
        self._utf8 = _incremental_utf8(errors)
        # The first word of a text loses the space that encoding has put before it; one that
        # follows a prompt keeps its own.
        begins = all(token_id in skip for token_id in prompt)
        self._strip = self._bytes.strip_spaces if begins else 0

    def decode(self, ids: Sequence[int]) -> str:
        """The characters that these ids complete."""
        skip = self._skip
        data = b"".join([self._bytes[i] for i in ids if i not in skip])
        text = self._utf8.decode(data) if data else ""
        return self._stripped(text) if self._strip and text else text

    def finish(self) -> str:
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text.startswith(" "):
            text = text[1:]
            self._strip -= 1
        if text:
            self._strip = 0
        return text


class _ContextDecoder:
    """For any other tokenizer: decodes the last few tokens anew with each."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip: frozenset[int]) -> None:
        self._backend = tokenizer.backend
        self._skip = skip
        context = [token_id for token_id in prompt[-4 * _CONTEXT :] if token_id not in skip]
        self._context = context[-_CONTEXT:]
        self._ids: list[int] = []
        self._given = ""
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The characters that these ids complete."""
        new = [token_id for token_id in ids if token_id not in self._skip]
        self._ids += new
        text = "".join(self._stream.step(self._backend, token_id) or "" for token_id in new)
        self._given += text
        return text

    def finish(self) -> str:
        before = self._backend.decode(self._context, skip_special_tokens=False)
        whole = self._backend.decode(self._context + self._ids, skip_special_tokens=False)
        done = len(before) + len(self._given)
        return whole[done:] if whole.startswith(before + self._given) else ""
