"""How the C library keeps memory that is freed while weights pass through the host."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator

# Parameters of mallopt(3), and where glibc's own adaptation of them ends.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_THRESHOLD = 32 * 2**20

_SMALL_BYTES = 2**20


@contextlib.contextmanager
def freed_at_once() -> Iterator[None]:
    """Within, blocks above a mebibyte go back to the system when they are freed.

    glibc otherwise keeps blocks of up to 32 MiB for reuse, in an arena a thread: several times
    the largest tensor, all of it without use. Mapping each block costs loading nothing measurable,
    but would cost the steps of the CPU backend, so it ends with the block. Does nothing with other
    C libraries.
    """
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _SMALL_BYTES)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)


def _mallopt() -> Callable[[int, int], int] | None:
    try:
        return ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return None
