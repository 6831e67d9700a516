"""Lanes: groups of requests whose steps can be under way at once."""

import pytest

from jaxllm.outputs import SchedulerOutput
from tests.scheduler.paged_device import Loop, continuation


def lane_sizes(loop: Loop) -> list[int]:
    return [len(lane) for lane in loop.scheduler._running.lanes]


def names(step: SchedulerOutput | None) -> set[str]:
    return {item.request.request_id for item in step.requests} if step else set()


@pytest.mark.parametrize(
    ("count", "sizes"), [(8, [2, 2, 2, 2]), (6, [2, 2, 1, 1]), (1, [1, 0, 0, 0])]
)
def test_newcomers_are_shared_out_evenly(count: int, sizes: list[int]) -> None:
    loop = Loop(num_lanes=4, max_num_seqs=8, depth=4)
    for i in range(count):
        loop.add(str(i), 3, max_tokens=9)
    for _ in range(4):
        loop.dispatch()
    assert sorted(lane_sizes(loop), reverse=True) == sizes


def test_steps_under_way_share_no_request() -> None:
    """With every lane busy, a request's next step comes as many steps later as there are lanes."""
    loop = Loop(num_lanes=4, max_num_seqs=8, depth=4)
    for i in range(8):
        loop.add(str(i), 3, max_tokens=30)
    for _ in range(4):
        loop.step()
    for _ in range(20):
        loop.step()
        assert loop.scheduler.num_steps_ahead == 4
        under_way = [names(step) for step, _ in list(loop.pending)[-4:]]
        assert sum(map(len, under_way)) == len(set().union(*under_way))
    loop.run()
    prompt = [0, 1, 2]
    assert all(loop.tokens(str(i)) == continuation(prompt, 30) for i in range(8))


def test_idle_lanes_are_passed_over() -> None:
    loop = Loop(num_lanes=4, depth=4)
    loop.add("a", 3, max_tokens=12)
    steps = [loop.dispatch() for _ in range(5)]
    assert [names(step) for step in steps] == [{"a"}] * 5
    # One step beyond the awaited one: more would wait for each other, and a newcomer for them.
    assert loop.scheduler.num_steps_ahead == 1
    loop.add("b", 3, max_tokens=12)
    assert [names(loop.dispatch()) for _ in range(4)] == [{"b"}, {"a"}, {"b"}, {"a"}]
    assert loop.scheduler.num_steps_ahead == 2
    loop.run()


def test_a_long_prompt_fills_the_pipeline_by_itself() -> None:
    loop = Loop(num_lanes=4, max_num_batched_tokens=8, depth=4)
    loop.add("a", 40, max_tokens=2)
    chunks = [loop.dispatch() for _ in range(4)]
    assert [step.requests[0].start for step in chunks if step] == [0, 8, 16, 24]
    assert loop.scheduler.num_steps_ahead == 4
    loop.run()


def test_a_lane_that_emptied_gets_the_next_newcomers() -> None:
    loop = Loop(num_lanes=2, max_num_seqs=8, depth=2)
    for i in range(4):
        loop.add(str(i), 3, max_tokens=2 if i < 2 else 30)
    while loop.scheduler.stats().num_running != 2 or loop.scheduler.stats().num_waiting:
        loop.step()
    assert sorted(lane_sizes(loop)) == [0, 2]
    for i in range(4, 6):
        loop.add(str(i), 3, max_tokens=30)
    loop.step()
    loop.step()
    assert lane_sizes(loop) == [2, 2]
    loop.run()


def test_the_request_admitted_last_is_preempted_whatever_its_lane() -> None:
    loop = Loop(num_lanes=2, num_blocks=7, max_num_seqs=4, depth=2, enable_prefix_caching=False)
    for i in range(4):
        loop.add(str(i), 4, max_tokens=10)
    loop.run()
    assert loop.scheduler.stats().num_preemptions > 0
    assert all(loop.tokens(str(i)) == continuation([0, 1, 2, 3], 10) for i in range(4))
