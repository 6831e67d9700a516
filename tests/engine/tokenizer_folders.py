"""Small tokenizers in Hugging Face form."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and it doesn't stop.",
    "Être ou ne pas être. 世界你好 Привет 👩‍👩‍👧 ďábel ก็ 12345",
    "the then than that system user assistant tool message hello world",
]
SPECIAL = ["<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML


def byte_level(*, bos: bool = False) -> Tokenizer:
    """A trained byte-level BPE; with `bos`, its post-processor begins texts with <s>."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[("<s>", 0)]
        )
    return backend


def save(folder: Path, backend: Tokenizer, **config: Any) -> Path:
    """Writes tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
