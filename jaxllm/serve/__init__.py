"""The OpenAI-compatible server: python -m jaxllm.serve."""
