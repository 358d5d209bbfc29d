"""The only place that knows how JAX 0.10, 0.11 and 0.12 differ."""
