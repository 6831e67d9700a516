"""The device side: mesh, weights, cache, buckets and the jitted steps."""
