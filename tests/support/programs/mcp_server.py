"""A small MCP server over stdio, for tests: run it as a program. It also sends what a client must ignore or refuse."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def answer(message: dict[str, Any]) -> dict[str, Any] | None:
    match message.get("method"):
        case "initialize":
            return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "test"}}
        case "tools/list":
            schema = {"type": "object", "properties": {"text": {"type": "string"}}}
            if "cursor" not in message["params"]:
                return {"tools": [{"name": "echo", "description": "Echo.", "inputSchema": schema}], "nextCursor": "2"}
            return {"tools": [{"name": "variable"}, {"name": "fail"}, {"name": "end"}, {"name": "no good name"}]}
        case "tools/call":
            return call(message["params"]["name"], message["params"]["arguments"])
        case _:
            return None


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if name == "end":
        sys.exit()
    if name == "fail":
        return {"isError": True, "content": [{"type": "text", "text": "It failed."}]}
    text = os.environ.get(arguments["text"], "-") if name == "variable" else arguments["text"]
    return {"content": [{"type": "text", "text": text}, {"type": "image", "data": ""}]}


def main() -> None:
    refusals: list[Any] = []
    for line in sys.stdin:
        message = json.loads(line)
        if "method" not in message:
            refusals.append(message["error"]["code"])
            continue
        if message["method"] == "tools/list":
            print("not JSON", flush=True)
            print(json.dumps({"jsonrpc": "2.0", "id": 900, "method": "roots/list"}), flush=True)
        result = answer(message)
        if "id" in message:
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main()
