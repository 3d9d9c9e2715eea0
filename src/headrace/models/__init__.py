"""WHAT a model is: its description, its weights, its tokenizer and its chat template."""
