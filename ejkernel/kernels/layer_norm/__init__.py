"""Backends of `layer_norm`."""
