"""Memory that passes through the host while weights are loaded is given back at once."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxllm.converters import host_memory
from jaxllm.converters.host_memory import freed_at_once

SIZE = 24 * 2**20


def anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def leave_a_hole() -> int:
    """Bytes still held after a block below another one is freed."""
    before = anonymous_bytes()
    lower, upper = np.ones(SIZE, np.uint8), np.ones(2**19, np.uint8)
    del lower
    held = anonymous_bytes() - before
    del upper
    return held


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_freed_blocks_are_given_back() -> None:
    if host_memory._mallopt() is None:
        pytest.skip("not glibc")
    with freed_at_once():
        assert leave_a_hole() < SIZE / 4


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_mallopt", lambda: None)
    with freed_at_once():
        assert np.ones(SIZE, np.uint8).all()
