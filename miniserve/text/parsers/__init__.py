"""Tool calls in generated text: one file for each syntax, `formats.py` has the table of them."""
