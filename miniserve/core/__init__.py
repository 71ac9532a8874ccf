"""Scheduling and KV cache bookkeeping, in plain Python: knows of tokens and blocks, never of tensors."""
