"""The engine and its two sides: requests in, text out."""
