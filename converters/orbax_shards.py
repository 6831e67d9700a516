"""Shards of parameters that a mesh holds otherwise than a converted folder does.

A folder has each kv head once and no row of padding. Over more devices than kv heads each of these
stands several times, with a part of its query heads, and a vocabulary that does not divide has rows
of zeros after it. Which part of the stored parameter makes a device's shard is arithmetic on
indices: only that part is read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxllm.converters.name_map import HEADS_IN, NameMap, Op

Index = tuple[slice, ...]
Read = Callable[[Index], np.ndarray]


@dataclass(frozen=True)
class Spread:
    """How a parameter of `shape` comes of the stored one.

    Attributes:
        heads: its axis of kv heads, of which each stands `replicas` times.
        group: its axis that holds a kv head's query heads, which the replicas share out.
        shared: entries at the end of `group` that every replica has: key and value.
        padding: rows of zeros at the end of the first axis.
    """

    shape: tuple[int, ...]
    replicas: int = 1
    heads: int = 0
    group: int = 0
    shared: int = 0
    padding: int = 0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        sizes = list(self.shape)
        sizes[0] -= self.padding
        if self.replicas > 1:
            sizes[self.heads] //= self.replicas
            sizes[self.group] = self._queries * self.replicas + self.shared
        return tuple(sizes)

    @property
    def _queries(self) -> int:
        """Query heads of a replica."""
        return self.shape[self.group] - self.shared

    def read(self, read: Read, index: Index) -> np.ndarray:
        """The part `index` of the parameter, made of parts that `read` takes from the stored one.

        Args:
            index: a slice of step 1 for each axis; the whole of axis `group`.
        """
        full = tuple(
            slice(*part.indices(size)) for part, size in zip(index, self.shape, strict=True)
        )
        if self.padding:
            return self._padded(read, full)
        if self.replicas == 1:
            return read(full)
        if full[self.group] != slice(0, self.shape[self.group], 1):
            raise ValueError(f"a shard has {full[self.group]} of a kv head's group, not all of it")
        heads = range(full[self.heads].start, full[self.heads].stop)
        parts = [self._head(read, full, head) for head in heads]
        return np.concatenate(parts, axis=self.heads)

    def _head(self, read: Read, index: Index, head: int) -> np.ndarray:
        stored, replica = divmod(head, self.replicas)

        def part(first: int, last: int) -> np.ndarray:
            place = list(index)
            place[self.heads] = slice(stored, stored + 1)
            place[self.group] = slice(first, last)
            return read(tuple(place))

        queries = part(replica * self._queries, (replica + 1) * self._queries)
        if not self.shared:
            return queries
        end = self._queries * self.replicas
        return np.concatenate([queries, part(end, end + self.shared)], axis=self.group)

    def _padded(self, read: Read, index: Index) -> np.ndarray:
        rows, real = index[0], self.shape[0] - self.padding
        first, last = min(rows.start, real), min(rows.stop, real)
        found = read((slice(first, last), *index[1:]))
        missing = rows.stop - rows.start - (last - first)
        return np.pad(found, [(0, missing), *[(0, 0)] * (found.ndim - 1)])


def spread_of(param: str, shape: tuple[int, ...], name_map: NameMap | None) -> Spread:
    """How the parameter `param` of `shape` comes of the stored one.

    Args:
        name_map: the model's on its mesh (`NameMap.on_mesh`), which knows what is repeated and
            padded.
    """
    rules = [] if name_map is None else name_map.rules
    replicas = max((rule.op.replicas for rule in rules), default=1)
    op = next((rule.op for rule in rules if rule.sources(param)), Op("KEEP"))
    if op.padding:
        return Spread(shape, padding=op.padding)
    if op.per_kv_head and replicas > 1:
        heads, group = (0, op.axis) if op.order is None else (op.order[0], op.order[op.axis])
        return Spread(shape, replicas, heads, group, len(op.per_kv_head))
    if op == HEADS_IN and replicas > 1:
        return Spread(shape, replicas, 0, 1)
    return Spread(shape)
