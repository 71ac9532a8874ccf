"""The model runner: tensors of a step, the KV pool, sampling."""
