"""Templates to CUDA text."""

from kgen.render.render import Renderer, free_names

__all__ = ["Renderer", "free_names"]
