"""Frozen value types shared by every layer. No torch, no CUDA, no disk."""
