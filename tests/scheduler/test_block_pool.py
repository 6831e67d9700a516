import pytest

from jaxllm.request import Request
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.block_pool import BlockPool

BLOCK_SIZE = 4


def make_request(
    tokens: list[int] | int,
    *,
    name: str = "a",
    group_id: str | None = None,
    cache_salt: str | None = None,
) -> Request:
    tokens = list(range(tokens)) if isinstance(tokens, int) else tokens
    return Request(name, tokens, SamplingParams(), group_id=group_id, cache_salt=cache_salt)


def compute(pool: BlockPool, request: Request) -> Request:
    """Gives a request its blocks and marks all its tokens as computed."""
    assert pool.acquire(request, read_cache=True)
    request.num_computed_tokens = len(request.token_ids)
    pool.register(request)
    return request


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(8, BLOCK_SIZE)


def test_blocks_are_given_once_and_come_back(pool: BlockPool):
    first, second = pool.allocate(3), pool.allocate(5)
    assert sorted(first + second) == list(range(8))
    assert pool.num_free == 0
    pool.free(first)
    assert pool.num_free == 3
    assert sorted(pool.allocate(3)) == sorted(first)


def test_too_many_blocks_raise(pool: BlockPool):
    pool.allocate(6)
    with pytest.raises(RuntimeError, match="3 blocks asked for, 2 are free"):
        pool.allocate(3)


def test_freeing_twice_raises(pool: BlockPool):
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(RuntimeError, match="nobody holds it"):
        pool.free(blocks)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_an_empty_pool_is_refused(num_blocks: int, block_size: int):
    with pytest.raises(ValueError, match="at least one block of one token"):
        BlockPool(num_blocks, block_size)


@pytest.mark.parametrize(
    ("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (17, 16)]
)
def test_one_token_is_left_to_compute(pool: BlockPool, length: int, hit: int):
    pool.release(compute(pool, make_request(length)))
    again = make_request(length)
    pool.acquire(again, read_cache=True)
    assert again.num_computed_tokens == hit
    assert again.num_hashed_blocks == hit // BLOCK_SIZE
    assert len(again.block_ids) == -(-length // BLOCK_SIZE)


def test_held_blocks_are_shared(pool: BlockPool):
    first = compute(pool, make_request(9, name="a"))
    second = compute(pool, make_request(9, name="b"))
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert pool.num_free == 8 - 4
    pool.check_integrity([first, second])
    pool.release(first)
    pool.check_integrity([second])
    pool.release(second)
    assert (pool.num_free, pool.num_cached) == (8, 2)


def test_a_hash_stands_for_all_tokens_before(pool: BlockPool):
    compute(pool, make_request([1, 1, 1, 1, 2, 2, 2, 2]))
    other = make_request([3, 3, 3, 3, 2, 2, 2, 2, 5])
    assert pool.lookup(other, 9) == []


@pytest.mark.parametrize("tokens", [[1, 2, 3, 4], [2**31, 0, 0, 7]])
def test_blocks_are_told_apart_by_every_token(pool: BlockPool, tokens: list[int]):
    compute(pool, make_request(tokens))
    for index in range(BLOCK_SIZE):
        other = [*tokens, 9]
        other[index] += 1
        assert pool.lookup(make_request(other), 5) == []
    assert len(pool.lookup(make_request([*tokens, 9]), 5)) == 1


@pytest.mark.parametrize("salts", [("x", "y"), (None, "x"), (None, ""), ("None", None)])
def test_salts_keep_requests_apart(pool: BlockPool, salts: tuple[str | None, str | None]):
    compute(pool, make_request(8, cache_salt=salts[0]))
    assert pool.lookup(make_request(8, cache_salt=salts[1]), 8) == []
    assert len(pool.lookup(make_request(8, cache_salt=salts[0]), 8)) == 2


def test_with_prefix_caching_groups_share(pool: BlockPool):
    compute(pool, make_request(8, group_id="g"))
    assert len(pool.lookup(make_request(8, group_id="h"), 8)) == 2
    assert len(pool.lookup(make_request(8), 8)) == 2


def test_without_prefix_caching_only_a_group_shares():
    pool = BlockPool(16, BLOCK_SIZE, enable_prefix_caching=False)
    compute(pool, make_request(8, name="alone"))
    compute(pool, make_request(8, name="sibling", group_id="g"))
    assert pool.lookup(make_request(8), 8) == []
    assert pool.lookup(make_request(8, group_id="h"), 8) == []
    assert len(pool.lookup(make_request(8, group_id="g"), 8)) == 2
    assert pool.num_queried_tokens == 0


def test_a_lone_request_is_not_hashed_without_prefix_caching():
    pool = BlockPool(16, BLOCK_SIZE, enable_prefix_caching=False)
    assert compute(pool, make_request(8)).block_hashes == []


def test_freed_blocks_are_hit_until_reused(pool: BlockPool):
    pool.release(compute(pool, make_request(16)))
    pool.allocate(4)
    assert len(pool.lookup(make_request(16), 16)) == 4
    pool.allocate(1)
    assert len(pool.lookup(make_request(16), 16)) == 3


def test_the_tail_is_evicted_before_the_head(pool: BlockPool):
    request = compute(pool, make_request(16))
    blocks = request.block_ids
    pool.release(request)
    pool.allocate(4)
    assert [pool.allocate(1)[0] for _ in range(4)] == blocks[::-1]


def test_the_least_recently_used_goes_first(pool: BlockPool):
    first = compute(pool, make_request([1] * 8))
    second = compute(pool, make_request([2] * 8))
    old, young = first.block_ids, second.block_ids
    pool.release(first)
    pool.release(second)
    # A hit makes the first the younger one.
    pool.release(compute(pool, make_request([1] * 8)))
    pool.allocate(4)
    taken = [pool.allocate(1)[0] for _ in range(4)]
    # The hit covered its first block; its last token was computed again, in a spare block.
    assert taken == [old[1], *young[::-1], old[0]]


def test_blocks_without_content_go_before_cached_ones(pool: BlockPool):
    cached = compute(pool, make_request(16))
    partial = compute(pool, make_request([9] * 3))
    pool.release(cached)
    pool.release(partial)
    pool.allocate(4)
    assert pool.num_cached == 4


def test_equal_content_is_registered_once(pool: BlockPool):
    requests = [make_request(8, name=name) for name in "ab"]
    for request in requests:
        pool.acquire(request, read_cache=True)
    for request in requests:
        request.num_computed_tokens = 8
        pool.register(request)
    pool.check_integrity(requests)
    assert pool.lookup(make_request(8), 8) == requests[0].block_ids
    for request in requests:
        pool.release(request)
    assert pool.num_cached == 2


def test_only_full_blocks_with_known_tokens_are_registered(pool: BlockPool):
    request = make_request(7)
    pool.acquire(request, read_cache=True)
    request.num_computed_tokens = 8  # of a token in flight
    pool.register(request)
    assert request.num_hashed_blocks == 1
    request.token_ids.append(7)
    pool.register(request)
    assert len(pool.lookup(make_request(8), 8)) == 2


def test_acquire_changes_nothing_when_blocks_are_short(pool: BlockPool):
    holder = compute(pool, make_request(16))
    request = make_request([*range(16), *range(17)])
    assert not pool.acquire(request, read_cache=True)
    assert request.block_ids == []
    pool.check_integrity([holder, request])
    request = make_request([*range(16), *range(16)])
    assert pool.acquire(request, read_cache=True)
    assert pool.num_free == 0


def test_acquire_counts_cached_free_blocks_as_taken(pool: BlockPool):
    pool.release(compute(pool, make_request(16)))
    assert not pool.acquire(make_request(33), read_cache=True)
    assert pool.acquire(make_request(32), read_cache=True)


def test_acquire_leaves_spare_blocks(pool: BlockPool):
    assert not pool.acquire(make_request(32), read_cache=True, spare=1)
    assert pool.acquire(make_request(28), read_cache=True, spare=1)


@pytest.mark.parametrize("released", [False, True])
def test_forgotten_content_is_not_found(pool: BlockPool, released: bool):
    bad = compute(pool, make_request([1] * 8, name="bad"))
    good = compute(pool, make_request([2] * 8, name="good"))
    if released:
        pool.release(bad)
    pool.forget(bad)
    assert pool.lookup(make_request([1] * 8), 8) == []
    assert pool.lookup(make_request([2] * 8), 8) == good.block_ids
    assert pool.num_cached == 0
    pool.check_integrity([good] if released else [bad, good])


def test_reset_forgets_all_and_keeps_holders(pool: BlockPool):
    held = compute(pool, make_request([1] * 8, name="held"))
    pool.release(compute(pool, make_request([2] * 8)))
    pool.reset()
    assert pool.num_cached == 0
    for token in (1, 2):
        assert pool.lookup(make_request([token] * 8), 8) == []
    pool.check_integrity([held])


def test_hits_are_counted_in_tokens(pool: BlockPool):
    pool.release(compute(pool, make_request(10)))
    pool.release(compute(pool, make_request(10)))
    assert (pool.num_queried_tokens, pool.num_hit_tokens) == (20, 8)
    pool.acquire(make_request(10), read_cache=False)
    assert (pool.num_queried_tokens, pool.num_hit_tokens) == (20, 8)


def test_integrity_finds_a_leak(pool: BlockPool):
    pool.acquire(make_request(4), read_cache=True)
    with pytest.raises(AssertionError, match=r"has a count of 1 but is held by \[\]"):
        pool.check_integrity([])


def test_integrity_finds_a_block_held_by_too_many(pool: BlockPool):
    first = compute(pool, make_request(4, name="first"))
    second = make_request(4, name="second")
    second.block_ids = list(first.block_ids)
    with pytest.raises(AssertionError, match=r"held by \['first', 'second'\]"):
        pool.check_integrity([first, second])


def test_integrity_finds_a_block_shared_by_different_tokens(pool: BlockPool):
    first = compute(pool, make_request([1] * 4, name="first"))
    second = make_request([2] * 4, name="second")
    pool.incref(first.block_ids)
    second.block_ids, second.num_computed_tokens = list(first.block_ids), 4
    with pytest.raises(AssertionError, match="shared wrongly by first"):
        pool.check_integrity([first, second])


def test_integrity_finds_a_block_held_twice(pool: BlockPool):
    request = compute(pool, make_request(4))
    request.block_ids *= 2
    with pytest.raises(AssertionError, match=r"request a holds blocks .* twice"):
        pool.check_integrity([request])


def test_integrity_finds_a_lost_block(pool: BlockPool):
    pool._free.popitem()
    with pytest.raises(AssertionError, match="with 0 holders is not in the free list"):
        pool.check_integrity([])
