"""How one step's numbers lie in the single int32 buffer that is uploaded for it.

One host-to-device copy a step instead of a dozen: each costs 10-20 microseconds.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
from jax import lax

from jaxllm.runner.buckets import Bucket

FLOAT_FIELDS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
INT_FIELDS = ("top_k", "min_tokens", "seed")
SAMPLING_FIELDS = FLOAT_FIELDS + INT_FIELDS
FEEDBACK = -1
"""Token id that stands for "what the request's last step sampled", which only the device knows."""
ALIGN = 64
"""Fields start at multiples of 256 bytes: XLA hands a kernel a slice of the buffer as it lies
there, and Mosaic GPU kernels refuse anything less aligned."""


@dataclass(frozen=True)
class BatchLayout:
    """Offsets of the fields for a bucket and a block-table width W.

    Fields: first the sampler's: slots, write_slots, output_index i32[B], each sampling field [B]
    (floats as their bits), mode i32[1]; they lie alike in all buckets of B requests. Then
    token_ids, positions, slot_mapping i32[T]; query_start i32[B+1]; seq_lens, last_token i32[B];
    block_tables i32[B, W].
    """

    bucket: Bucket
    table_width: int

    @cached_property
    def fields(self) -> dict[str, tuple[int, int, tuple[int, ...]]]:
        """Name -> (offset, size, shape)."""
        t, b = self.bucket.num_tokens, self.bucket.num_requests
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
            ("slots", "write_slots", "output_index", *SAMPLING_FIELDS), (b,)
        )
        shapes["mode"] = (1,)
        shapes |= dict.fromkeys(("token_ids", "positions", "slot_mapping"), (t,))
        shapes["query_start"] = (b + 1,)
        shapes |= dict.fromkeys(("seq_lens", "last_token"), (b,))
        shapes["block_tables"] = (b, self.table_width)
        fields, offset = {}, 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            fields[name] = (offset, size, shape)
            offset += -(-size // ALIGN) * ALIGN
        return fields

    @cached_property
    def size(self) -> int:
        offset, size, _ = self.fields["block_tables"]
        return offset + size

    @cached_property
    def sampler_size(self) -> int:
        """Where the sampler's fields end."""
        return self.fields["token_ids"][0]

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Host side: a writable view of each field; float fields as float32."""
        views = {}
        for name, (offset, size, shape) in self.fields.items():
            view = buffer[offset : offset + size].reshape(shape)
            views[name] = view.view(np.float32) if name in FLOAT_FIELDS else view
        return views

    def unpack(self, buffer: jax.Array) -> dict[str, jax.Array]:
        """Device side: the fields that `buffer` has, the uploaded i32[size] or a beginning of
        it."""
        arrays = {}
        for name, (offset, size, shape) in self.fields.items():
            if offset + size > len(buffer):
                break
            array = lax.slice(buffer, (offset,), (offset + size,)).reshape(shape)
            if name in FLOAT_FIELDS:
                array = lax.bitcast_convert_type(array, np.float32)
            arrays[name] = array
        return arrays
