"""Name map of Qwen2ForCausalLM (transformers: models/qwen2/modeling_qwen2.py).

The names are Llama's; the biases of q, k and v are active because the model has them.
"""

from jaxllm.converters import llama

NAME_MAP = llama.NAME_MAP
