"""The blocks of the cache: who holds them, which are free, and whose content can be hit again."""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from jaxllm.request import Request

_HASH_BYTES = 16


@dataclass(slots=True)
class Block:
    """One block of the cache.

    Attributes:
        ref_count: how many requests hold it; 0 is free.
        hash: of its tokens and all before them, while a request may find it by that; else None.
    """

    ref_count: int = 0
    hash: bytes | None = None


class BlockPool:
    """Allocates blocks and finds the cached ones of a prefix.

    A freed block keeps its hash and can be hit until it is taken for other content. Free blocks
    are taken in this order: those without a hash, then the least recently freed; of one request
    the last block before the first, since a block is of no use without those before it.

    Blocks may be freed, and taken by another request, while steps that use them are still
    running: the device runs steps in order, so later ones overwrite after earlier ones have read.

    Args:
        num_blocks: blocks in the cache.
        block_size: tokens in a block.
        enable_prefix_caching: without it only requests of one group_id share blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"the block cache needs at least one block of one token, got {num_blocks} blocks "
                f"of {block_size} tokens."
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_cached = 0
        """Free blocks whose content can still be hit."""
        self._blocks = [Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no request holds, cached ones included."""
        return len(self._free)

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole cache holds."""
        return self.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one holder each; what was cached in them is lost.

        Raises:
            RuntimeError: fewer are free. Ask `num_free` first.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} are free.")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            block = self._blocks[block_id]
            block.ref_count = 1
            if block.hash is not None:
                del self._by_hash[block.hash]
                block.hash = None
                self.num_cached -= 1
        return taken

    def incref(self, block_ids: Iterable[int]) -> None:
        """One more holder for each block; a free one leaves the free list with its content."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                del self._free[block_id]
                self.num_cached -= block.hash is not None
            block.ref_count += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """One holder less for each of a request's blocks, given in the order of its tokens."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            if block.ref_count < 1:
                raise RuntimeError(f"block {block_id} is freed but nobody holds it.")
            block.ref_count -= 1
            if block.ref_count:
                continue
            self._free[block_id] = None
            if block.hash is None:
                self._free.move_to_end(block_id, last=False)
            else:
                self.num_cached += 1

    def acquire(self, request: Request, *, read_cache: bool, spare: int = 0) -> bool:
        """Gives a request the blocks for all its tokens, cached ones first.

        Sets its block_ids, num_computed_tokens and num_hashed_blocks. At least one token is left
        to compute, or there would be no logits.

        Returns:
            False, with nothing changed, if fewer than `spare` blocks would stay free.
        """
        length = len(request.token_ids)
        hits = self.lookup(request, length - 1) if read_cache else []
        count = self.num_blocks_for(length) - len(hits)
        num_free_hits = sum(self._blocks[block_id].ref_count == 0 for block_id in hits)
        if len(self._free) - num_free_hits < count + spare:
            return False
        self.incref(hits)
        request.block_ids = hits + self.allocate(count)
        request.num_hashed_blocks = len(hits)
        request.num_computed_tokens = len(hits) * self.block_size
        if read_cache and self.enable_prefix_caching and request.num_preemptions == 0:
            self.num_queried_tokens += length
            self.num_hit_tokens += request.num_computed_tokens
        return True

    def release(self, request: Request) -> None:
        """Takes all blocks from a request."""
        self.free(request.block_ids)
        request.block_ids = []
        request.num_hashed_blocks = 0
        request.num_computed_tokens = 0

    def shares(self, request: Request) -> bool:
        """Whether the request's blocks may be found by another one."""
        return self.enable_prefix_caching or request.group_id is not None

    def lookup(self, request: Request, max_tokens: int) -> list[int]:
        """The cached blocks of the longest prefix of at most `max_tokens` tokens, not yet held."""
        if not self.shares(request):
            return []
        count = max_tokens // self.block_size
        self._extend_hashes(request, count)
        return self._find(request.block_hashes[:count])

    def register(self, request: Request) -> None:
        """Makes the request's full blocks findable, once the step that fills them is scheduled.

        A block whose content another block already has stays without a hash.
        """
        if not self.shares(request):
            return
        full = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        if full <= request.num_hashed_blocks:
            return
        self._extend_hashes(request, full)
        for index in range(request.num_hashed_blocks, full):
            block_id, block_hash = request.block_ids[index], request.block_hashes[index]
            if block_hash not in self._by_hash:
                self._blocks[block_id].hash = block_hash
                self._by_hash[block_hash] = block_id
        request.num_hashed_blocks = full

    def forget(self, request: Request) -> None:
        """Makes the content of the request's blocks unfindable: it may be non-finite.

        A request that lost its blocks may have left content behind: that goes by its hashes.
        """
        known = (self._by_hash.get(block_hash) for block_hash in request.block_hashes)
        held = request.block_ids
        for block_id in held or [block_id for block_id in known if block_id is not None]:
            self._drop_hash(block_id)

    def reset(self) -> None:
        """Makes all content unfindable."""
        for block_id in list(self._by_hash.values()):
            self._drop_hash(block_id)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raises AssertionError unless the books agree with what `requests` hold.

        Every block is free or held, never both; shared only by requests with equal tokens up to
        its end, all of which have it computed; and every hash leads to its own block.
        """
        holders: dict[int, list[tuple[Request, int]]] = {}
        for request in requests:
            doubled = [b for b, n in Counter(request.block_ids).items() if n > 1]
            _check(not doubled, f"request {request.request_id} holds blocks {doubled} twice")
            for index, block_id in enumerate(request.block_ids):
                holders.setdefault(block_id, []).append((request, index))
        for block_id, block in enumerate(self._blocks):
            held = holders.get(block_id, [])
            names = [request.request_id for request, _ in held]
            _check(
                block.ref_count == len(held),
                f"block {block_id} has a count of {block.ref_count} but is held by {names}",
            )
            _check(
                (block_id in self._free) == (block.ref_count == 0),
                f"block {block_id} with {block.ref_count} holders is "
                f"{'' if block_id in self._free else 'not '}in the free list",
            )
            _check(
                block.hash is None or self._by_hash.get(block.hash) == block_id,
                f"the hash of block {block_id} leads elsewhere",
            )
            if len(held) > 1:
                self._check_shared(block_id, held)
        hashed = [block for block in self._blocks if block.hash is not None]
        _check(len(hashed) == len(self._by_hash), "hashes without a block")
        cached = sum(block.ref_count == 0 for block in hashed)
        _check(cached == self.num_cached, f"{cached} blocks are cached, not {self.num_cached}")

    def _check_shared(self, block_id: int, held: list[tuple[Request, int]]) -> None:
        first, index = held[0]
        end = (index + 1) * self.block_size
        for request, other_index in held:
            _check(
                other_index == index
                and request.token_ids[:end] == first.token_ids[:end]
                and self._root(request) == self._root(first)
                and request.num_computed_tokens >= end
                and len(request.token_ids) >= end,
                f"block {block_id} is shared wrongly by {first.request_id} (block {index}) and "
                f"{request.request_id} (block {other_index})",
            )

    def _find(self, block_hashes: Iterable[bytes]) -> list[int]:
        found = []
        for block_hash in block_hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _drop_hash(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.hash is None:
            return
        del self._by_hash[block.hash]
        block.hash = None
        if block.ref_count == 0:
            self.num_cached -= 1
            self._free.move_to_end(block_id, last=False)

    def _root(self, request: Request) -> bytes:
        """What a request's first block is chained to: requests share nothing across roots."""
        group = None if self.enable_prefix_caching else request.group_id
        return blake2b(repr((request.cache_salt, group)).encode(), digest_size=_HASH_BYTES).digest()

    def _extend_hashes(self, request: Request, count: int) -> None:
        hashes = request.block_hashes
        if len(hashes) >= count:
            return
        parent = hashes[-1] if hashes else self._root(request)
        for start in range(len(hashes) * self.block_size, count * self.block_size, self.block_size):
            tokens = array("q", request.token_ids[start : start + self.block_size])
            parent = blake2b(parent + tokens.tobytes(), digest_size=_HASH_BYTES).digest()
            hashes.append(parent)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(f"block pool: {message}.")
