"""How byte-level BPE vocabularies cut a text into words before merging: tokenizer.ggml.pre.

A GGUF file names the rule instead of holding it. Each entry is what the tokenizer.json of the
models that carry the name says; a name that is not here is refused, since a wrong rule gives text
that is only a little worse, which nobody notices.
"""

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

# The split of GPT-2 itself is built into ByteLevel (use_regex).
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """One rule.

    Attributes:
        splits: regular expressions, applied one after the other; () is GPT-2's own split.
        digits: whether each digit is cut off first, or after the splits if there are any.
        nfc: whether the text is normalized first.
        ignore_merges: whether a word that is a token is one, however it merges.
        add_bos: whether a text begins with BOS if the file does not say.
    """

    splits: tuple[str, ...] = ()
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def normalizer(self) -> Any:
        """A tokenizers Normalizer, or None."""
        return normalizers.NFC() if self.nfc else None

    def build(self) -> Any:
        """The tokenizers PreTokenizer."""
        steps: list[Any] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.splits
        ]
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.splits))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


GPT2 = PreTokenizer()
DIGITS = PreTokenizer(digits=True)
LLAMA3 = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
QWEN2 = PreTokenizer((_QWEN2,), nfc=True)

PRE_TOKENIZERS = {
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "codeshell": DIGITS,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+"), digits=True
    ),
}

# What "default", the name that old conversions gave to anything, most likely stands for.
DEFAULTS = {"llama": GPT2, "qwen2": QWEN2, "qwen3": QWEN2}
