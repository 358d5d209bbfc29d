from ejkernel import _compat

_compat.load_pallas()
