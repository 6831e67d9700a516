"""One engine in several processes: they meet, run the same steps, and end together."""
