"""From user requests to sequences, and from the engine's news to RequestOutputs with text.

Synchronous and without I/O: `LLM` drives it in process, `AsyncEngine` in the front process.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from jaxllm.engine.detokenizer import Detokenizer
from jaxllm.engine.inputs import GenerationInput, check_input
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.outputs import (
    CompletionOutput,
    EngineOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    TokenLogprobs,
)
from jaxllm.request import Request

_SEED_MASK = 2**64 - 1


@dataclass(slots=True)
class ProcessedOutputs:
    """What `process` made of a step.

    Attributes:
        request_outputs: in the order in which their news came.
        aborts: sequences that the engine must be told to drop (a stop string ended them).
    """

    request_outputs: list[RequestOutput] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)


def merge_delta(earlier: RequestOutput, later: RequestOutput) -> None:
    """Adds the delta `later` to the delta `earlier`, which it follows."""
    known = {completion.index: completion for completion in earlier.outputs}
    for new in later.outputs:
        old = known.get(new.index)
        if old is None:
            earlier.outputs.append(new)
            continue
        old.text += new.text
        old.token_ids += new.token_ids
        if new.logprobs is not None:
            old.logprobs = [*(old.logprobs or ()), *new.logprobs]
        old.cumulative_logprob = new.cumulative_logprob
        old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
    earlier.finished = later.finished
    earlier.num_cached_tokens = later.num_cached_tokens
    earlier.error = later.error


class _Completion:
    """One sequence, and what it has given (of a delta request: since that was last taken)."""

    def __init__(self, index: int, request_id: str, detokenizer: Detokenizer | None) -> None:
        self.index = index
        self.request_id = request_id
        self.detokenizer = detokenizer
        self.finished = False
        self.output = CompletionOutput(index=index, text="", token_ids=[])

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.finished = True
        self.output.finish_reason = reason
        self.output.stop_reason = stop_reason

    def add_token(self, token_id: int, logprobs: dict[int, Logprob] | None) -> None:
        output = self.output
        output.token_ids.append(token_id)
        if logprobs is not None:
            output.logprobs = output.logprobs or []
            output.logprobs.append(logprobs)
            value = logprobs[token_id].logprob
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + value

    def take(self) -> CompletionOutput | None:
        """The output, which starts anew; None if it has no news."""
        taken = self.output
        if not (taken.token_ids or taken.text or taken.finish_reason):
            return None
        total = taken.cumulative_logprob
        self.output = CompletionOutput(self.index, text="", token_ids=[], cumulative_logprob=total)
        return taken

    def snapshot(self) -> CompletionOutput:
        output = self.output
        logprobs = None if output.logprobs is None else list(output.logprobs)
        return replace(output, token_ids=list(output.token_ids), logprobs=logprobs)


@dataclass(slots=True)
class _RequestState:
    request: GenerationInput
    completions: list[_Completion]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def finished(self) -> bool:
        return all(c.finished for c in self.completions)


class OutputProcessor:
    """Keeps the state of all running requests on the front's side.

    Args:
        tokenizer: None to work on token ids only.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        max_model_len: int,
        vocab_size: int,
        max_logprobs: int,
        eos_token_ids: Iterable[int],
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.max_logprobs = max_logprobs
        self.eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[str, _RequestState] = {}
        self._owner: dict[str, tuple[_RequestState, _Completion]] = {}  # by sequence id
        self._pieces: dict[int, str] = {}

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def add(self, request: GenerationInput) -> list[Request]:
        """The n sequences for the engine, ids `{request_id}-{i}`, seeds seed + i.

        Raises:
            ValueError: the request does not fit the model, or its id is in use.
        """
        check_input(
            request,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            max_logprobs=self.max_logprobs,
        )
        if request.request_id in self._requests:
            raise ValueError(f"request_id {request.request_id!r} is already in use.")
        params = request.sampling_params
        sequences: list[Request] = []
        completions: list[_Completion] = []
        for i in range(params.n):
            sequence_id = f"{request.request_id}-{i}"
            sequences.append(
                Request(
                    request_id=sequence_id,
                    prompt_token_ids=request.prompt_token_ids,
                    sampling_params=params,
                    eos_token_ids=self.eos_token_ids,
                    seed=0 if params.seed is None else (params.seed + i) & _SEED_MASK,
                    group_id=request.request_id if params.n > 1 else None,
                    cache_salt=request.cache_salt,
                )
            )
            detokenizer = None
            if self.tokenizer is not None and params.detokenize:
                detokenizer = Detokenizer(self.tokenizer, request.prompt_token_ids, params)
            completions.append(_Completion(i, sequence_id, detokenizer))
        wants_prompt = params.prompt_logprobs is not None
        state = _RequestState(request, completions, [None] if wants_prompt else None)
        self._requests[request.request_id] = state
        for completion in completions:
            self._owner[completion.request_id] = (state, completion)
        return sequences

    def abort(self, request_id: str) -> list[str]:
        """Forgets a request; returns the sequences that the engine still has to drop."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return []
        running = [c.request_id for c in state.completions if not c.finished]
        for sequence_id in running:
            del self._owner[sequence_id]
        return running

    def process(self, outputs: Iterable[EngineOutput]) -> ProcessedOutputs:
        """Takes a step's news in; news of unknown (aborted) sequences are dropped."""
        result = ProcessedOutputs()
        touched: dict[str, _RequestState] = {}
        for output in outputs:
            state, completion = self._owner.get(output.request_id, (None, None))
            if state is None or completion is None:
                continue
            touched[state.request.request_id] = state
            self._take(state, completion, output)
            if completion.finished:
                del self._owner[output.request_id]
                if not output.finished:
                    result.aborts.append(output.request_id)
        for request_id, state in touched.items():
            request_output = self._request_output(state)
            if request_output is not None:
                result.request_outputs.append(request_output)
            if state.finished:
                del self._requests[request_id]
        return result

    def _take(self, state: _RequestState, completion: _Completion, output: EngineOutput) -> None:
        if completion.index == 0:
            state.num_cached_tokens = max(state.num_cached_tokens, output.num_cached_tokens)
        # One sibling delivers them: the first, unless it was aborted before it ran.
        self._take_prompt_logprobs(state, output.prompt_logprobs)
        detokenizer = completion.detokenizer
        last = len(output.new_token_ids) - 1
        for i, token_id in enumerate(output.new_token_ids):
            logprobs = output.new_logprobs[i] if output.new_logprobs else None
            completion.add_token(token_id, self._logprobs_dict(logprobs))
            if detokenizer is None:
                continue
            ends = i == last and output.finish_reason == "stop"
            text, stop = detokenizer.push([token_id], ends_with_stop_token=ends)
            completion.output.text += text
            if stop is not None:
                completion.finish("stop", stop)  # tokens behind the stop are dropped
                return
        if output.finish_reason is not None:
            if detokenizer is not None:
                completion.output.text += detokenizer.finish()
            completion.finish(output.finish_reason, output.stop_reason)
            state.error = state.error or output.error

    def _take_prompt_logprobs(self, state: _RequestState, news: list[TokenLogprobs] | None) -> None:
        if state.prompt_logprobs is not None and news:  # each position is delivered once
            state.prompt_logprobs += [self._logprobs_dict(entry) for entry in news]

    def _logprobs_dict(self, entry: TokenLogprobs | None) -> dict[int, Logprob] | None:
        """The token itself first, then the top ones by rank."""
        if entry is None:
            return None
        ids, values = entry.token_ids, entry.logprobs
        result = {ids[0]: Logprob(values[0], entry.rank, self._piece(ids[0]))}
        for rank, (token_id, value) in enumerate(zip(ids[1:], values[1:], strict=True), start=1):
            if token_id not in result:
                result[token_id] = Logprob(value, rank, self._piece(token_id))
        return result

    def _piece(self, token_id: int) -> str | None:
        if self.tokenizer is None:
            return None
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self.tokenizer.token_text(token_id)
            self._pieces[token_id] = piece  # at most one entry a vocabulary id
        return piece

    def _request_output(self, state: _RequestState) -> RequestOutput | None:
        request, finished = state.request, state.finished
        if request.kind == "final" and not finished:
            return None
        if request.kind == "delta":
            outputs = [taken for c in state.completions if (taken := c.take()) is not None]
            if not outputs:
                return None
        else:
            outputs = [c.snapshot() for c in state.completions]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            prompt_logprobs=state.prompt_logprobs,
            num_cached_tokens=state.num_cached_tokens,
            error=state.error,
        )
