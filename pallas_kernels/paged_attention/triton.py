"""Paged attention through Pallas' Triton lowering, for any NVIDIA GPU since Ampere.

Decode is at the memory limit of an H200 with it; for prefill it is the fallback.
"""

from jaxllm.pallas_kernels.paged_attention.triton_decode import decode_attention
from jaxllm.pallas_kernels.paged_attention.triton_ragged import ragged_attention

__all__ = ["decode_attention", "ragged_attention"]
