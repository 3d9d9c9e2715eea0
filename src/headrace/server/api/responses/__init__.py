"""The Responses API: requests, items, stored and background responses."""
