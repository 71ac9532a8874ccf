"""One module an endpoint family."""
