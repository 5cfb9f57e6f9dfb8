"""`isotrain completion`: a script with which a shell completes commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from isotrain.core.cli.command import Command

_SHELLS = ("bash", "zsh", "fish")
_BASH = """\
_isotrain() {{
  local words
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words="{commands}"; fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _isotrain isotrain
"""
_ZSH = """\
(( $+functions[compdef] )) || { autoload -U +X compinit && compinit }
autoload -U +X bashcompinit && bashcompinit
"""


def completion(options: argparse.Namespace) -> None:
    """Prints the script."""
    words = {name: command.completions for name, command in options.program.commands.items()}
    if options.shell == "fish":
        print(_fish(words), end="")
        return
    cases = "\n".join(f'    {name}) words="{" ".join(each)}" ;;' for name, each in words.items())
    script = _BASH.format(cases=cases, commands=" ".join(words))
    print(_ZSH + script if options.shell == "zsh" else script, end="")


def _fish(words: Mapping[str, Sequence[str]]) -> str:
    lines = [f"complete -c isotrain -n __fish_use_subcommand -a '{' '.join(words)}'"]
    for name, each in words.items():
        condition = f"-n '__fish_seen_subcommand_from {name}'"
        lines += [
            f"complete -c isotrain {condition} -l {word.removeprefix('--')}"
            if word.startswith("--")
            else f"complete -c isotrain {condition} -a {word}"
            for word in each
        ]
    return "\n".join(lines) + "\n"


def _add_completion_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "shell", metavar="SHELL", choices=_SHELLS, help="the shell: bash, zsh or fish"
    )


COMPLETION = Command(
    "completion",
    "print a script for completion in bash, zsh or fish",
    "Prints a script with which a shell completes commands and options.",
    """\
examples:
  isotrain completion bash >> ~/.bashrc
  isotrain completion zsh >> ~/.zshrc
  isotrain completion fish > ~/.config/fish/completions/isotrain.fish""",
    add_arguments=_add_completion_arguments,
    module=__name__,
)
