"""Backends of `rms_norm`."""
