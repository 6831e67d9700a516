"""An LLMEngine with text around it, in this process: what `LLM` and benchmarks drive."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.engine.inputs import GenerationInput, OutputKind
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.output_processor import OutputProcessor
from jaxllm.engine.startup import Log
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams, generation_defaults

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""


class LocalEngine:
    """Text or ids in, RequestOutputs out.

    Args:
        config: `skip_tokenizer_init` leaves the tokenizer out; prompts are ids then.

    Raises:
        ValueError, FileNotFoundError: the model cannot be served as asked; says why.
    """

    def __init__(self, config: EngineConfig, *, offline: bool = True, log: Log = logger.info):
        if config.several_processes or config.distributed:
            raise ValueError(
                "Only the server runs over several processes: python -m jaxllm.serve with "
                "--coordinator-address, --num-processes and --process-id."
            )
        self.tokenizer = None if config.skip_tokenizer_init else Tokenizer.load(config)
        self.engine = LLMEngine(config, offline=offline, log=log)
        self.config = self.engine.config
        assert self.config.max_model_len
        eos = self.tokenizer.eos_token_ids if self.tokenizer else frozenset()
        self._processor = OutputProcessor(
            self.tokenizer,
            max_model_len=self.config.max_model_len,
            vocab_size=self.engine.vocab_size,
            max_logprobs=self.config.max_logprobs,
            eos_token_ids=self.engine.eos_token_ids | frozenset(eos),
        )
        self._queued_tokens = 0

    def default_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for, if the config follows it."""
        if self.config.generation_config != "auto":
            return SamplingParams()
        return SamplingParams(**generation_defaults(self.engine.generation_config))

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt's text, if it has one, and its ids.

        Raises:
            ValueError: an unknown kind of prompt, or text without a tokenizer.
        """
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            prompt = prompt.get("prompt", prompt)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("Text prompts need a tokenizer: drop skip_tokenizer_init.")
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, Sequence) and all(isinstance(i, int) for i in prompt):
            return None, list(prompt)
        raise ValueError(
            "A prompt is text, a list of token ids, {'prompt': text} or "
            f"{{'prompt_token_ids': ids}}; got {type(prompt).__name__}."
        )

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        kind: OutputKind = "final",
    ) -> None:
        """Queues a request; its outputs come from `step`.

        Raises:
            ValueError: it does not fit the model; says what and the limit.
        """
        text, ids = self.tokenize(prompt)
        request = GenerationInput(
            request_id=request_id,
            prompt_token_ids=ids,
            sampling_params=params,
            prompt=text,
            kind=kind,
        )
        sequences = self._processor.add(request)
        try:
            for sequence in sequences:
                self.engine.add_request(sequence)
        except ValueError:
            self.abort_request(request_id)
            raise
        self._queued_tokens += len(ids)

    def start_if_full(self) -> None:
        """Gives an idle device its first step as soon as the queued prompts fill one.

        So it works while the rest of a long list of prompts is tokenized and queued.
        """
        assert self.config.max_num_batched_tokens
        full = self._queued_tokens >= self.config.max_num_batched_tokens
        if full and not self.engine.has_pending:
            self.engine.step()

    def abort_request(self, request_id: str) -> None:
        """Ends a request; its blocks are free at once."""
        for sequence_id in self._processor.abort(request_id):
            self.engine.abort(sequence_id)

    def has_unfinished_requests(self) -> bool:
        # A step in flight may outlive the last request: its surplus token is still taken in.
        return self._processor.has_unfinished() or self.engine.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """One step of the engine, as text."""
        self._queued_tokens = 0
        processed = self._processor.process(self.engine.step())
        for sequence_id in processed.aborts:
            self.engine.abort(sequence_id)
        return processed.request_outputs
