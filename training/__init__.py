"""The recipe that makes the bundled models from nothing: corpus, tokenizer, mini, draft, evaluation, card."""
