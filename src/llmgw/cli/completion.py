"""``llmgw completion``: the shell's half of completion, printed."""

from __future__ import annotations

import click


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the script that completes llmgw's words in SHELL.

    \b
    bash:  llmgw completion bash > ~/.local/share/bash-completion/completions/llmgw
    zsh:   llmgw completion zsh > ~/.llmgw-complete.zsh
           and in ~/.zshrc, after compinit:  source ~/.llmgw-complete.zsh
    fish:  llmgw completion fish > ~/.config/fish/completions/llmgw.fish

    A new shell then completes commands, options and files.
    """
    from click.shell_completion import get_completion_class

    from llmgw.cli import app

    script = get_completion_class(shell)
    if script is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(script(app, {}, "llmgw", "_LLMGW_COMPLETE").source())
