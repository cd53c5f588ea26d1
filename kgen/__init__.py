"""kgen: autotuned CUDA kernels from Jinja templates."""

__version__ = "0.1.0"
