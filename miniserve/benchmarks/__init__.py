"""Measurements: each compares miniserve with something else in the same run, since absolute numbers do not travel."""
