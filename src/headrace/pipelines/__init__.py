"""Applications around a model, inside the server. Everything here calls the gateway's flow as a client."""
