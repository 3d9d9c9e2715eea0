"""GPUs of this machine, as their drivers report them."""
