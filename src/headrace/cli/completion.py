"""`headrace completion`: print a shell's completion script, which knows every command and flag."""

from __future__ import annotations

from typing import Literal


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print the completion script of a shell.

    Usage: headrace completion bash > ~/.local/share/bash-completion/completions/headrace

    For zsh, write it to a file `_headrace` in a folder of $fpath; for fish, to
    ~/.config/fish/completions/headrace.fish.

    Parameters
    ----------
    shell
        bash, zsh or fish.
    """
    from headrace.cli.command_app import app

    print(app.generate_completion(shell=shell), end="")
