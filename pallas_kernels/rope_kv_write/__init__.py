"""Rotary embedding of new queries and keys, and writing keys and values into the paged cache."""
