"""Attention over the paged KV cache: one oracle, and backends that must agree with it."""
