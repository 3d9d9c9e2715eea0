"""Serve large language models with low latency."""

TYPE_CHECKING = False  # so that `headrace.__main__` is reached without an import, which Ctrl-C could interrupt
if TYPE_CHECKING:
    from typing import Any

    from headrace.llm import LLM as LLM
    from headrace.llm import AsyncLLM as AsyncLLM
    from headrace.server.local_gateway import LocalGateway as LocalGateway
    from headrace.version import __version__ as __version__

__all__ = ["LLM", "AsyncLLM", "LocalGateway", "__version__"]


def __getattr__(name: str) -> "Any":
    # Imported on first use, so that `headrace --help` is quick.
    if name in ("LLM", "AsyncLLM"):
        from headrace import llm

        return getattr(llm, name)
    if name == "LocalGateway":
        from headrace.server.local_gateway import LocalGateway

        return LocalGateway
    if name == "__version__":
        from headrace.version import __version__

        return __version__
    raise AttributeError(f"module 'headrace' has no attribute '{name}'")
