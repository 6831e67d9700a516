"""Checkpoint readers, name maps and the loader."""

assert __name__ == "jaxllm.converters", "import jaxllm.converters, not converters"
