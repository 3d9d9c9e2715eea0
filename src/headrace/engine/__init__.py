"""RUN a model: executors, and what feeds them."""
