"""Gets models from elsewhere, a model hub or a package index, and finds those that were downloaded before."""
