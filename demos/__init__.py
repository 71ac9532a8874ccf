"""Demonstrations to run and to read, one idea a file. Part of the checkout, not of the installed package."""
