"""Makes requests cheaper: shaping fits them to a model, the ladder reduces service under pressure."""
