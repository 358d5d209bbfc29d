"""Every error ejkernel raises on purpose; catch `EjkernelError` to catch them all."""


class EjkernelError(Exception):
    """Base class of ejkernel's own errors."""
