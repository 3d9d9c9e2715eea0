"""The semantic cache: answers a question with the stored answer to the same question in other words."""
