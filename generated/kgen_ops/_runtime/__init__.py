"""What runs kernels, with no import from kgen: emitted libraries carry a verbatim copy of it."""
