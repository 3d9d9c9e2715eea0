"""Tools that the tools stage may call: HTTP APIs, SQL queries, Python functions and MCP servers."""
