"""How layers are split into pipeline stages."""

from itertools import combinations, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.runner.stages import DivisionError, make_stages, split


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    count=st.integers(1, 8),
    before=st.integers(0, 100),
    after=st.integers(0, 100),
)
def test_the_largest_part_is_as_small_as_can_be(
    sizes: list[int], count: int, before: int, after: int
) -> None:
    count = min(count, len(sizes))

    def largest(cuts: list[int]) -> int:
        parts = [sum(sizes[start:stop]) for start, stop in pairwise(cuts)]
        parts[0] += before
        parts[-1] += after
        return max(parts)

    parts = split(sizes, count, before, after)
    assert [i for part in parts for i in part] == [*range(len(sizes))]
    assert len(parts) == count
    assert all(parts)
    every = combinations(range(1, len(sizes)), count - 1)
    best = min(largest([0, *cuts, len(sizes)]) for cuts in every)
    assert largest([0, *(part.stop for part in parts)]) == best


def test_of_the_best_cuts_the_evenest_is_taken() -> None:
    # The embedding alone is the largest part: what follows is shared out evenly all the same.
    assert split([1] * 7, 3, 9, 0) == [range(1), range(1, 4), range(4, 7)]
    assert split([1] * 5, 3, 0, 0) == [range(2), range(2, 4), range(4, 5)]


def shapes(layers: int, *, tied: bool) -> dict[str, SimpleNamespace]:
    sizes = {f"model.layers.{i}.mlp.weight": 10 for i in range(layers)}
    sizes = {"model.embed_tokens.weight": 20} | sizes | {"model.norm.weight": 1}
    sizes |= {} if tied else {"lm_head.weight": 20}
    return {
        name: SimpleNamespace(size=size, dtype=np.dtype("int8")) for name, size in sizes.items()
    }


@pytest.mark.parametrize("tied", [False, True])
def test_the_ends_count(tied: bool) -> None:
    first, middle, last = make_stages(shapes(8, tied=tied), 3)
    assert [len(stage.layers) for stage in (first, middle, last)] == [2, 4, 2]
    assert (first.first, middle.first, middle.last, last.last) == (True, False, False, True)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert first.names[0] == "model.embed_tokens.weight"
    assert {head, "model.norm.weight"} <= {*last.names}
    assert middle.names == tuple(f"model.layers.{i}.mlp.weight" for i in range(2, 6))
    names = [name for stage in (first, middle, last) for name in stage.names]
    assert len(names) == len(shapes(8, tied=tied)) + tied  # a tied embedding is in two stages


def test_one_stage_has_all() -> None:
    (stage,) = make_stages(shapes(3, tied=True), 1)
    assert stage.names == tuple(shapes(3, tied=True))
    assert (stage.layers, stage.first, stage.last) == (range(3), True, True)


def test_a_stage_needs_a_layer() -> None:
    with pytest.raises(DivisionError, match="-parallel-size 4 exceeds num_hidden_layers = 3"):
        make_stages(shapes(3, tied=False), 4)
