"""Compiled operators for CPUs, each with a plain PyTorch twin.

`csrc` is the C++ source, `build` compiles it for this machine, `native` is its Python side, `reference` has the twins.
Nothing here knows of models, requests or configuration.
"""
