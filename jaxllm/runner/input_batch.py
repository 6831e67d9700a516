"""The running requests as numpy rows, one a slot, and a step's upload made from them."""

import numpy as np

from jaxllm.outputs import SchedulerOutput
from jaxllm.request import Request
from jaxllm.runner.batch_layout import FEEDBACK, FLOAT_FIELDS, SAMPLING_FIELDS, BatchLayout
from jaxllm.sampling_params import SamplingParams


class InputBatch:
    """Host copies of what the device needs of each slot, changed in place, never rebuilt.

    Args:
        num_slots: most running requests.
        table_width: W, blocks of the longest context.
        block_size: S.
        cache_slots: P * S; token slots from here on are dropped by the cache write.
    """

    def __init__(self, num_slots: int, table_width: int, block_size: int, cache_slots: int) -> None:
        self.num_slots = num_slots
        self.block_size = block_size
        self.cache_slots = cache_slots
        self._tables = np.zeros((num_slots, table_width), np.int32)
        self._num_blocks = np.zeros(num_slots, np.int32)
        self._sampling = {
            name: np.zeros(num_slots, np.float32 if name in FLOAT_FIELDS else np.int32)
            for name in SAMPLING_FIELDS
        }

    def _admit(self, slot: int, request: Request) -> None:
        self._num_blocks[slot] = 0
        params: SamplingParams = request.sampling_params
        row = self._sampling
        row["temperature"][slot] = 0.0 if params.greedy else params.temperature
        row["top_p"][slot] = params.top_p
        row["min_p"][slot] = params.min_p
        row["repetition"][slot] = params.repetition_penalty
        row["presence"][slot] = params.presence_penalty
        row["frequency"][slot] = params.frequency_penalty
        row["top_k"][slot] = min(max(params.top_k, 0), np.iinfo(np.int32).max)
        row["min_tokens"][slot] = min(params.min_tokens, np.iinfo(np.int32).max)
        # The sampler's generator takes 32 bits; both halves of a longer seed count.
        seed = request.seed & 0xFFFFFFFFFFFFFFFF
        row["seed"][slot] = np.uint32((seed ^ (seed >> 32)) & 0xFFFFFFFF).view(np.int32)

    def _extend_table(self, slot: int, block_ids: list[int]) -> None:
        known = self._num_blocks[slot]
        if known < len(block_ids):
            self._tables[slot, known : len(block_ids)] = block_ids[known:]
            self._num_blocks[slot] = len(block_ids)

    def pack(self, step: SchedulerOutput, layout: BatchLayout, mode: int) -> np.ndarray:
        """The upload for `step`: i32[layout.size], padded as models/batch.py asks."""
        buffer = np.zeros(layout.size, np.int32)
        views = layout.views(buffer)
        num = len(step.requests)
        slots = np.empty(num, np.int32)
        starts = np.empty(num, np.int32)
        lengths = np.empty(num, np.int32)
        output_index, write_slots = views["output_index"], views["write_slots"]
        write_slots[:] = self.num_slots
        tokens: list[int] = []
        for i, item in enumerate(step.requests):
            request, slot, start = item.request, item.slot, item.start
            if item.admitted:
                self._admit(slot, request)
            self._extend_table(slot, request.block_ids)
            slots[i], starts[i], lengths[i] = slot, start, item.num_new_tokens
            if item.samples:
                write_slots[i] = slot
                output_index[i] = item.output_index
            known = request.token_ids
            if item.num_new_tokens == 1:
                tokens.append(known[start] if start < len(known) else FEEDBACK)
            else:
                tokens += known[start : start + item.num_new_tokens]
        self._fill_tokens(views, tokens, slots, starts, lengths)
        views["slots"][:num] = slots
        views["seq_lens"][:num] = starts + lengths
        for name in SAMPLING_FIELDS:
            views[name][:num] = self._sampling[name][slots]
        views["mode"][0] = mode
        views["block_tables"][:num] = self._tables[slots]
        return buffer

    def _fill_tokens(
        self,
        views: dict[str, np.ndarray],
        tokens: list[int],
        slots: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        num, total = len(slots), len(tokens)
        views["token_ids"][:total] = tokens
        query_start = views["query_start"]
        np.cumsum(lengths, out=query_start[1 : num + 1])
        query_start[num + 1 :] = total
        views["last_token"][:num] = query_start[1 : num + 1] - 1
        positions = views["positions"]
        owner = np.repeat(np.arange(num), lengths)
        positions[:total] = np.arange(total) - np.repeat(query_start[:num] - starts, lengths)
        block = positions[:total] // self.block_size
        slot_mapping = views["slot_mapping"]
        slot_mapping[:total] = (
            self._tables[slots[owner], block] * self.block_size
            + positions[:total] % self.block_size
        )
        padding = len(slot_mapping) - total
        slot_mapping[total:] = self.cache_slots + np.arange(padding)
