"""The layers of a transformer, each for every family and device."""
