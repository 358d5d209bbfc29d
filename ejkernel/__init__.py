"""JAX operations that find, check and store their fastest configuration."""

__version__ = "0.1.0"
