"""Arrays that go to their devices in pieces."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.converters import upload as module
from jaxllm.converters.upload import upload
from jaxllm.runner.mesh import make_mesh


@pytest.mark.parametrize(
    ("shape", "spec"),
    [((), ()), ((7,), ()), ((40, 3), ()), ((40, 3), ("tp",)), ((5, 8), (None, "tp"))],
)
@pytest.mark.parametrize("piece", [1, 50, 1 << 20])
def test_an_array_is_the_same_in_pieces_of_any_size(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], spec: tuple[Any, ...], piece: int
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", piece)
    values = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    sharding = NamedSharding(make_mesh(tensor_parallel_size=4), PartitionSpec(*spec))
    array = upload(shape, sharding, lambda index: values[index or ()])
    assert (array.shape, array.dtype) == (values.shape, values.dtype)
    assert array.sharding.is_equivalent_to(sharding, array.ndim)
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])


def test_no_piece_is_larger_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 100)
    sizes: list[int] = []
    put = jax.device_put

    def watched(values: Any, device: Any) -> jax.Array:
        sizes.append(values.nbytes)
        return put(values, device)

    monkeypatch.setattr(jax, "device_put", watched)
    values = np.zeros((33, 6), np.float32)
    sharding = NamedSharding(make_mesh(), PartitionSpec())
    upload(values.shape, sharding, lambda index: values[index or ()])
    assert sum(sizes) == values.nbytes
    assert max(sizes) == 96
