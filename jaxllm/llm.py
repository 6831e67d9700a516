"""`LLM`: offline generation, with vLLM's signatures."""

import itertools
import logging
from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

from tqdm import tqdm

from jaxllm.config import EngineConfig
from jaxllm.engine.local_engine import LocalEngine, Prompt
from jaxllm.engine.tokenizer import normalize_messages
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several; a flat list of ints is one prompt of ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(isinstance(p, int) for p in prompts):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


class LLM:
    """A model, ready to generate in this process.

    >>> llm = LLM("demo")
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text

    Args:
        model: folder, .gguf file, hub id or "demo".
        engine_args: the other fields of EngineConfig.

    Raises:
        ValueError, FileNotFoundError: the model cannot be loaded as asked; says why.
        TypeError: an argument that EngineConfig does not have.
    """

    def __init__(self, model: str = EngineConfig.model, **engine_args: Any) -> None:
        self.llm_engine = LocalEngine(EngineConfig(model=model, **engine_args))
        self._ids = itertools.count()

    def get_tokenizer(self) -> Any:
        """The tokenizer, None with skip_tokenizer_init."""
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given none: the model's generation_config.json."""
        return self.llm_engine.default_params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes all prompts, batched as the engine sees fit; in the order of the prompts.

        Args:
            prompts: one or several of: text, token ids, {"prompt": …}, {"prompt_token_ids": …}.
            sampling_params: for all, or one for each.

        Raises:
            ValueError: a prompt or a parameter cannot be served; nothing is generated then.
        """
        items = _as_list(prompts)
        params = self._params_for(len(items), sampling_params)
        return self._run(items, params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        **template_args: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several.

        Args:
            messages: {"role": …, "content": …} each.
            template_args: for the chat template, as Tokenizer.apply_chat_template takes them;
                its own variables also as vLLM's `chat_template_kwargs`.

        Raises:
            ValueError: as `generate`, or the model has no chat template.
        """
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Sequence[Message]], messages if several else [messages])
        prompts = [self._render(c, template_args) for c in conversations]
        params = self._params_for(len(prompts), sampling_params)
        return self._run(prompts, params, use_tqdm)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **template_args: Any,
    ) -> Generator[RequestOutput]:
        """Completes one prompt, or answers one conversation, giving all so far after each step.

        Closing the iterator aborts the request.
        """
        if not isinstance(prompt, str | Mapping) and prompt and isinstance(prompt[0], Mapping):
            prompt = self._render(cast(Sequence[Message], prompt), template_args)
        params = sampling_params or self.get_default_sampling_params()
        engine, request_id = self.llm_engine, str(next(self._ids))
        engine.add_request(request_id, cast(Prompt, prompt), params, kind="cumulative")
        try:
            while engine.has_unfinished_requests():
                yield from engine.step()
        finally:
            engine.abort_request(request_id)

    def _render(self, messages: Sequence[Message], template_args: Mapping[str, Any]) -> Prompt:
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise ValueError("chat needs a tokenizer: drop skip_tokenizer_init.")
        options: dict[str, Any] = {
            "add_generation_prompt": not template_args.get("continue_final_message")
        }
        options |= template_args
        options |= options.pop("chat_template_kwargs", None) or {}
        text = tokenizer.apply_chat_template(
            normalize_messages(messages), tokenize=False, **options
        )
        # The template writes its own beginning-of-sequence token.
        ids = tokenizer.encode(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": ids}

    def _params_for(self, count: int, params: Params) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise ValueError(f"{count} prompts, but {len(params)} sampling_params: one each.")
        return list(params)

    def _run(
        self, prompts: list[Prompt], params: list[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        engine = self.llm_engine
        ids: list[str] = []
        outputs: dict[str, RequestOutput] = {}
        bar = tqdm(total=len(prompts), desc="Processed prompts", disable=not use_tqdm)
        try:
            for prompt, param in zip(prompts, params, strict=True):
                ids.append(str(next(self._ids)))
                engine.add_request(ids[-1], prompt, param)
                engine.start_if_full()
            tokens = 0
            while engine.has_unfinished_requests():
                for output in engine.step():
                    outputs[output.request_id] = output
                    tokens += sum(len(c.token_ids) for c in output.outputs)
                    seconds = bar.format_dict["elapsed"] or 1e-9
                    bar.set_postfix_str(f"output {tokens / seconds:.1f} tok/s")
                    bar.update(1)
        finally:
            # After an error or Ctrl-C nothing may go on in the background.
            for request_id in ids:
                if request_id not in outputs:
                    engine.abort_request(request_id)
            bar.close()
        return [outputs[request_id] for request_id in ids]
