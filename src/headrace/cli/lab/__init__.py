"""The commands that prove a variant before and while it gets traffic."""
