"""Templates to CUDA text."""

from kgen.render.render import Renderer, check_template, free_names

__all__ = ["Renderer", "check_template", "free_names"]
