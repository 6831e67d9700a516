"""The upload of a step: every padding rule of models/batch.py, on hand-made steps."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.outputs import ScheduledRequest, SchedulerOutput
from jaxllm.request import Request
from jaxllm.runner.batch_layout import FEEDBACK, BatchLayout
from jaxllm.runner.buckets import Bucket, Buckets
from jaxllm.runner.input_batch import InputBatch
from jaxllm.sampling_params import SamplingParams

BLOCK = 8
CACHE_SLOTS = 64 * BLOCK


def make_item(slot, start, count, *, known=None, blocks=None, admitted=True, **params):
    known = start + count if known is None else known
    request = Request(f"r{slot}", list(range(100, 100 + known)), SamplingParams(**params))
    request.block_ids = blocks or [slot * 8 + i for i in range(-(-(start + count) // BLOCK))]
    return ScheduledRequest(request, slot, start, count, True, 0, admitted)


def pack(items, bucket, num_slots=4, width=8):
    batch = InputBatch(num_slots, width, BLOCK, CACHE_SLOTS)
    layout = BatchLayout(bucket, width)
    return layout.views(batch.pack(SchedulerOutput(items), layout, 0))


def test_mixed_step_with_padding():
    views = pack([make_item(2, 9, 1), make_item(0, 3, 7)], Bucket(16, 4, False))
    assert views["query_start"].tolist() == [0, 1, 8, 8, 8]
    assert views["seq_lens"].tolist() == [10, 10, 0, 0]
    assert views["token_ids"][:8].tolist() == [109, *range(103, 110)]
    assert views["positions"][:8].tolist() == [9, *range(3, 10)]
    # Slot 2's blocks are 16, 17; slot 0's are 0, 1.
    assert views["slot_mapping"][0] == 17 * BLOCK + 1
    assert views["slot_mapping"][1:8].tolist() == list(range(3, 10))
    assert views["last_token"][:2].tolist() == [0, 7]
    assert views["write_slots"].tolist() == [2, 0, 4, 4]


def test_padding_tokens_get_distinct_slots_beyond_the_cache():
    views = pack([make_item(1, 0, 3)], Bucket(16, 4, False))
    padded = views["slot_mapping"][3:]
    assert padded.min() >= CACHE_SLOTS
    assert len(set(padded.tolist())) == len(padded)


def test_a_token_that_only_the_device_knows_is_fed_back():
    views = pack([make_item(3, 5, 1, known=5)], Bucket(2, 2, True))
    assert views["token_ids"].tolist() == [FEEDBACK, 0]


def test_blocks_are_appended_and_cleared_on_admission():
    batch = InputBatch(2, 8, BLOCK, CACHE_SLOTS)
    layout = BatchLayout(Bucket(1, 1, True), 8)
    item = make_item(1, 7, 1, blocks=[9])
    batch.pack(SchedulerOutput([item]), layout, 0)
    item.request.block_ids.append(5)
    later = ScheduledRequest(item.request, 1, 8, 1, True, 1, False)
    views = layout.views(batch.pack(SchedulerOutput([later]), layout, 0))
    assert views["block_tables"][0, :2].tolist() == [9, 5]
    assert views["slot_mapping"][0] == 5 * BLOCK
    other = make_item(1, 3, 1, blocks=[30])
    views = layout.views(batch.pack(SchedulerOutput([other]), layout, 0))
    assert views["slot_mapping"][0] == 30 * BLOCK + 3


def test_requests_that_do_not_sample_write_nowhere():
    item = make_item(1, 0, 3)
    part = ScheduledRequest(item.request, 1, 0, 3, False, 0, True)
    assert pack([part], Bucket(4, 2, False))["write_slots"].tolist() == [4, 4]


def test_sampling_rows_follow_their_request():
    a = make_item(0, 0, 1, temperature=0.5, top_k=3, top_p=0.9, min_tokens=2)
    b = make_item(1, 0, 1, temperature=1e-7, presence_penalty=1.5)
    views = pack([b, a], Bucket(2, 2, True))
    np.testing.assert_allclose(views["temperature"], [0.0, 0.5])
    np.testing.assert_allclose(views["presence"], [1.5, 0.0])
    assert views["top_k"].tolist() == [0, 3]
    assert views["min_tokens"].tolist() == [0, 2]


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_off(top_k):
    assert pack([make_item(0, 0, 1, top_k=top_k)], Bucket(1, 1, True))["top_k"][0] == 0


def test_unpack_inverts_views():
    layout = BatchLayout(Bucket(4, 2, False), 3)
    buffer: Any = np.arange(layout.size, dtype=np.int32)
    arrays = layout.unpack(buffer)
    for name, view in layout.views(buffer.copy()).items():
        np.testing.assert_array_equal(np.asarray(arrays[name]), view)


@given(
    max_num_seqs=st.integers(1, 40),
    extra=st.integers(0, 600),
    gpu=st.booleans(),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_every_legal_step_has_a_bucket_that_holds_it(max_num_seqs, extra, gpu, data):
    budget = max_num_seqs + extra
    buckets = Buckets.create(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, gpu=gpu)
    num = data.draw(st.integers(1, max_num_seqs))
    counts = [1] * num
    counts[-1] += data.draw(st.integers(0, budget - num))
    step = SchedulerOutput([make_item(i, 0, n, blocks=[0]) for i, n in enumerate(counts)])
    for mixed in (False, True):
        bucket = buckets.fit(step, mixed=mixed)
        assert bucket.num_requests >= num
        assert bucket.num_tokens >= sum(counts)
        assert bucket.decode_only == (max(counts) == 1 and not mixed)
        assert bucket.num_tokens <= budget
        assert bucket.num_requests <= max_num_seqs
        assert bucket in set(buckets)
