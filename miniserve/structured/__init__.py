"""Answers that keep to a grammar: compiling it, following an answer through it, masks of what may come next."""
