"""Backends of `linear_cross_entropy`."""
