"""Dispatch and launch of kernels, without imports from kgen: libraries have a verbatim copy."""
