"""The pipeline's overlap, by steps that meet each other rather than by the clock."""

import threading
from collections import Counter
from pathlib import Path

import pytest

from scripts.measure_bubble import Work, bubble, generate, make_engine, most_at_once, traced
from tests.runner.parallel_models import quickly_compiled

STAGES = 4


def test_all_stages_work_at_once_and_the_host_waits_for_none(tmp_path: Path) -> None:
    """In steady state the stages meet: none goes on before all four are at work, each on another
    step. If one waited for the host or for another step, the meeting would break up."""
    meeting = threading.Barrier(STAGES, timeout=30)
    calls: Counter[int] = Counter()
    met: Counter[int] = Counter()

    def work(stage: int) -> None:
        tick = calls[stage] + stage  # a stage is at the same step one tick after the one before
        calls[stage] += 1
        if 8 <= tick < 16:
            try:
                meeting.wait()
                met[tick] += 1
            except threading.BrokenBarrierError:
                pass

    with traced(work, STAGES), quickly_compiled():
        engine = make_engine(tmp_path, STAGES, STAGES)
        generate(engine, STAGES, 6)
    assert met == dict.fromkeys(range(8, 16), STAGES)
    assert calls == dict.fromkeys(range(STAGES), STAGES * 6)


def test_the_share_is_that_of_idle_time() -> None:
    # Two stages, three steps one after the other: each idles for one of four ticks.
    trace = [Work(stage, step + stage, step + stage + 1) for step in range(3) for stage in (0, 1)]
    assert bubble(trace, 2, 0, 4) == pytest.approx(1 / 4)
    assert bubble(trace, 2, 1, 3) == 0
    assert most_at_once(trace) == 2
    assert most_at_once(trace[:1]) == 1
