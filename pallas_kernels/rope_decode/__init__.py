"""A decode step's rotation, cache write and attention in one."""
