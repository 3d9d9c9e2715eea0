"""The semantic cache: an answer that was given once, for a question that asks the same in other words."""
