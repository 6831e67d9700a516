"""How much of the host's memory the cache takes on the CPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.runner.kv_cache import GIB, available_memory, cpu_budget


def test_the_budget_is_the_same_while_the_memory_changes_a_little() -> None:
    assert {cpu_budget(int(x * GIB), 1) for x in (17, 20, 24, 31)} == {2 * GIB}


def test_one_request_of_full_length_fits_where_half_of_the_memory_does() -> None:
    assert cpu_budget(4 * GIB, GIB) == GIB
    assert cpu_budget(4 * GIB, 3 * GIB) == GIB // 2


@given(available=st.integers(1, 2**45), one_request=st.integers(1, 2**45))
def test_never_more_than_half(available: int, one_request: int) -> None:
    assert 1 <= cpu_budget(available, one_request) <= max(available // 2, 1)


def test_memory_that_the_file_cache_holds_counts_as_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "MemTotal: 16000000 kB\nMemFree: 100 kB\nMemAvailable: 8388608 kB\n"
    monkeypatch.setattr("pathlib.Path.read_text", lambda self: text)
    assert available_memory() == 8 * GIB
    monkeypatch.setattr("pathlib.Path.read_text", lambda self: "MemFree: 100 kB\n")
    assert available_memory() > 0
