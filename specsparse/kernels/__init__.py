"""Matrix products, attention and the rest of a forward pass on packed weights."""

from specsparse.kernels.api import BACKENDS, Kernels, get, status
from specsparse.kernels.native_cpu import set_threads
from specsparse.kernels.qtensor import Layout, QTensor

__all__ = ["BACKENDS", "Kernels", "Layout", "QTensor", "get", "set_threads", "status"]
