"""JAX operations that find, prove and remember their fastest configuration."""

__version__ = "0.1.0"
