"""Where a request may not begin, and where it ends."""

import logging

from jaxllm.outputs import FinishReason
from jaxllm.request import Request
from jaxllm.scheduler.block_pool import BlockPool

NON_FINITE_ERROR = (
    "the model produced non-finite logits (NaN or infinity), so no token could be sampled. If it "
    "runs in float16, values above 65504 overflow: use --dtype bfloat16 or --dtype float32; "
    "otherwise the checkpoint itself may hold non-finite weights."
)

logger = logging.getLogger(__name__)


def check_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, pool: BlockPool
) -> None:
    """Raises ValueError if a step cannot hold a token of each request; warns of a small cache."""
    if not 1 <= max_num_seqs <= max_num_batched_tokens:
        raise ValueError(
            f"max_num_batched_tokens={max_num_batched_tokens} must be at least "
            f"max_num_seqs={max_num_seqs}: every running request needs a token a step."
        )
    if max_model_len > pool.num_tokens:
        logger.warning(
            "the block cache holds %d tokens, fewer than max_model_len=%d: longer requests are "
            "refused, or end there.",
            pool.num_tokens,
            max_model_len,
        )


def check_prompt(request: Request, max_model_len: int, pool: BlockPool) -> None:
    """Raises ValueError if the prompt and one token of output can never fit."""
    length = len(request.prompt_token_ids)
    if length == 0:
        raise ValueError("the prompt is empty: it needs at least one token.")
    if length >= max_model_len:
        raise ValueError(
            f"This model's maximum context length is {max_model_len} tokens. However, the prompt "
            f"has {length} tokens, and at least one more is needed for the output. Shorten the "
            f"prompt or raise --max-model-len."
        )
    if length >= pool.num_tokens:
        raise ValueError(
            f"the prompt with one token of output needs {length + 1} tokens of the block cache, "
            f"but only {pool.num_tokens} are available ({pool.num_blocks} blocks of "
            f"{pool.block_size}). Shorten the prompt or raise --gpu-memory-utilization."
        )


def resolve_max_tokens(request: Request, max_model_len: int, pool: BlockPool) -> int:
    """How many tokens the request may generate: it must be able to finish when it runs alone."""
    room = min(max_model_len, pool.num_tokens) - len(request.prompt_token_ids)
    asked = request.sampling_params.max_tokens
    return room if asked is None else min(asked, room)


def find_stop(request: Request) -> tuple[FinishReason | None, int | None]:
    """Why the request ends with its last known token, if it does, and the stop id if one did."""
    params = request.sampling_params
    token = request.token_ids[-1]
    num_output = len(request.token_ids) - len(request.prompt_token_ids)
    if token in request.stop_ids and num_output >= params.min_tokens:
        is_eos = token in request.eos_token_ids and not params.ignore_eos
        return "stop", None if is_eos else token
    return ("length" if num_output >= request.max_tokens else None), None
