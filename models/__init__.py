"""Model architectures: they declare parameters and compute, and know nothing of requests."""

assert __name__ == "jaxllm.models", "import jaxllm.models, not models"
