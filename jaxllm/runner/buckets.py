"""The padded sizes that get compiled: every step runs in the smallest bucket that holds it."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import count, takewhile

from jaxllm.outputs import SchedulerOutput


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """Sizes of one compiled step.

    Attributes:
        num_tokens: T; equal to num_requests where decode_only.
        num_requests: B.
        decode_only: every request has one new token.
    """

    num_tokens: int
    num_requests: int
    decode_only: bool

    def __str__(self) -> str:
        kind = "decode" if self.decode_only else "mixed"
        return f"{kind}[T={self.num_tokens}, B={self.num_requests}]"

    @property
    def label(self) -> str:
        """The same, fit for a file's name."""
        kind = "decode" if self.decode_only else "mixed"
        return f"{kind}-{self.num_tokens}-{self.num_requests}"


class Buckets:
    """All buckets of an engine; `fit` picks one for a step."""

    def __init__(self, decode_sizes: list[int], mixed_sizes: list[int], max_num_seqs: int) -> None:
        self._decode = [Bucket(size, size, True) for size in sorted(decode_sizes)]
        self._mixed = [Bucket(t, min(t, max_num_seqs), False) for t in sorted(mixed_sizes)]
        self._decode_sizes = [b.num_requests for b in self._decode]
        self._mixed_sizes = [b.num_tokens for b in self._mixed]

    @classmethod
    def create(cls, *, max_num_seqs: int, max_num_batched_tokens: int, gpu: bool) -> "Buckets":
        """The default sizes; the largest of each kind is exactly the limit.

        On a GPU decode sizes are fine-grained, since from a batch of about 184 on a padded row
        costs compute. They begin at 2: a single row XLA takes for a vector, with three kernels a
        norm and slow ones for small matrices (an H200 decodes Qwen3-0.6B in 1.51 ms instead of
        0.95, Llama-3.1-8B in 4.18 instead of 4.07). On the CPU few buckets keep the start short.
        """
        if gpu:
            decode = [2, 4, 8, 16, 32, 48, 64, 96, 128, 192]
            decode += list(range(256, max_num_seqs, 128))
            first, factor = 128, 2
        else:
            decode = list(takewhile(lambda n: n < max_num_seqs, (2**i for i in count())))
            first, factor = 16, 4
        mixed = takewhile(
            lambda n: n < max_num_batched_tokens, (first * factor**i for i in count())
        )
        return cls(
            [n for n in decode if n < max_num_seqs] + [max_num_seqs],
            [*mixed, max_num_batched_tokens],
            max_num_seqs,
        )

    def __iter__(self):
        """Largest first: what needs most memory fails first."""
        return iter(sorted(self._decode + self._mixed, reverse=True))

    @property
    def largest(self) -> Bucket:
        return self._mixed[-1]

    def fit(self, step: SchedulerOutput, *, mixed: bool = False) -> Bucket:
        """The smallest bucket for `step`; both limits are the scheduler's, so there is one.

        `mixed` asks for a mixed one, whose program gives hidden states as well.
        """
        if step.decode_only and not mixed:
            return self._decode[bisect_left(self._decode_sizes, len(step.requests))]
        return self._mixed[bisect_left(self._mixed_sizes, step.num_tokens)]
