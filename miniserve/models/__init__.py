"""The transformer, the families, and the checkpoints they are loaded from."""
