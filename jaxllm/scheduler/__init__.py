"""Host-side scheduling: which requests run, on which blocks. Imports no jax."""
