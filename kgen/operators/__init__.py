"""One module per operator, each defining `OPERATOR`. The catalogue discovers them."""
