"""Device kernels, one folder an operation; imports jax only."""

assert __name__ == "jaxllm.pallas_kernels", "import jaxllm.pallas_kernels, not pallas_kernels"
