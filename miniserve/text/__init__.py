"""Between text and token ids: tokenizer, chat template, detokenizer, stop strings."""
