"""Pipeline stages: which layers and parameters each of them has."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class DivisionError(ValueError):
    """Something does not divide over the devices; names it, its size and what would work."""


@dataclass(frozen=True)
class Stage:
    """One of `count` stages.

    Attributes:
        layers: the model's layers that it runs.
        names: its parameters. A tied embedding is in two stages: it serves as the head too.
    """

    index: int
    count: int
    layers: range
    names: tuple[str, ...]

    @property
    def first(self) -> bool:
        """Whether it embeds the tokens."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether it has the final norm, the head and the sampler."""
        return self.index == self.count - 1


def check_stages(num_layers: int, count: int) -> None:
    """Raises DivisionError if there are more stages than layers."""
    if count > num_layers:
        raise DivisionError(
            f"--pipeline-parallel-size {count} exceeds num_hidden_layers = {num_layers}: each "
            f"stage needs a layer, so at most {num_layers} works."
        )


def make_stages(shapes: Mapping[str, Any], count: int) -> list[Stage]:
    """Splits the layers into `count` stages, so that the fullest has as few bytes as can be.

    Args:
        shapes: dotted name -> shape and dtype, whole: how a layer is shared changes nothing.

    Raises:
        DivisionError: there are fewer layers than stages.
    """
    layers: dict[int, int] = {}
    ends = {EMBEDDING: 0, "": 0}
    for name, leaf in shapes.items():
        size = leaf.size * leaf.dtype.itemsize
        found = _LAYER.match(name)
        if found:
            layers[int(found[1])] = layers.get(int(found[1]), 0) + size
        else:
            ends[EMBEDDING if name == EMBEDDING else ""] += size
    tied = HEAD not in shapes
    sizes = [layers[index] for index in sorted(layers)]
    check_stages(len(sizes), count)
    parts = split(sizes, count, ends[EMBEDDING], ends[""] + (ends[EMBEDDING] if tied else 0))
    stages = []
    for index, part in enumerate(parts):
        first, last = index == 0, index == count - 1

        def belongs(name: str, part: range = part, first: bool = first, last: bool = last) -> bool:
            found = _LAYER.match(name)
            if found:
                return int(found[1]) in part
            if name == EMBEDDING:
                return first or (last and tied)
            return last

        stages.append(Stage(index, count, part, tuple(filter(belongs, shapes))))
    return stages


def split(sizes: Sequence[int], count: int, before: int, after: int) -> list[range]:
    """Cuts a row of sizes into `count` parts: the largest is as small as can be, and of those the
    parts most alike are taken.

    Args:
        before: what the first part has besides.
        after: what the last one has besides.
    """
    total = [0, *accumulate(sizes)]

    def part(index: int, start: int, stop: int) -> int:
        ends = before * (index == 0) + after * (index == count - 1)
        return total[stop] - total[start] + ends

    @cache
    def best(index: int, start: int, most: float) -> tuple[float, float, int]:
        """The largest part from `index` on, the sum of squares, and where the part ends; parts
        beyond `most` do not count."""
        if index == count - 1:
            size = part(index, start, len(sizes))
            return (size, size**2, len(sizes)) if size <= most else (math.inf, math.inf, 0)
        found = (math.inf, math.inf, 0)
        for stop in range(len(sizes) - (count - 1 - index), start, -1):
            size = part(index, start, stop)
            if size > most:
                continue
            largest, squares, _ = best(index + 1, stop, most)
            entry = (max(size, largest), size**2 + squares, stop)
            # Without a bound the largest part is sought, with one the evenest cut.
            found = min(found, entry, key=lambda e: e[0] if most == math.inf else e[1])
        return found

    most = best(0, 0, math.inf)[0]
    cuts = [0]
    for index in range(count):
        cuts.append(best(index, cuts[-1], most)[2])
    return [range(start, stop) for start, stop in pairwise(cuts)]
