"""What the scheduler counts from the start on."""

import time

from jaxllm.outputs import EngineStats
from jaxllm.scheduler.block_pool import BlockPool


class Counters:
    """Totals since the start, and when the last step ended."""

    def __init__(self) -> None:
        self.preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._steps = 0
        self._last_step_time = 0.0

    def step_done(self) -> None:
        """Notes that the results of a step are in."""
        self._steps += 1
        self._last_step_time = time.monotonic()

    def stats(self, pool: BlockPool, *, num_running: int, num_waiting: int) -> EngineStats:
        """A snapshot with that of queues and blocks; prefix cache counters are in tokens."""
        return EngineStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_preemptions=self.preemptions,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            prefix_cache_queries=pool.num_queried_tokens,
            prefix_cache_hits=pool.num_hit_tokens,
            num_steps=self._steps,
            last_step_time=self._last_step_time,
        )
