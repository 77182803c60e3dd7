"""``distdl completion``: a script for a shell, made from the parser. It knows words, so completing starts no Python."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from distdl.commands.usage import show_examples

Place = tuple[str, ...]  # the words that lead to a command, as ("draw", "conv")

_BASH = """_distdl() {{
  local here="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" place="" words=""
  if [ "$COMP_CWORD" -gt 1 ]; then place="${{COMP_WORDS[1]}}"; fi
  if [ "$COMP_CWORD" -gt 2 ]; then case "$place" in {nested}) place="$place ${{COMP_WORDS[2]}}";; esac; fi
  case "$place" in
{places}
  esac
  case "$before" in
{values}
  esac
  COMPREPLY=( $(compgen -W "$words" -- "$here") )
}}
complete -o bashdefault -o default -F _distdl distdl
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def add_completion(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``distdl completion``."""
    show_examples(
        parser,
        "distdl completion bash > ~/.local/share/bash-completion/completions/distdl",
        "distdl completion zsh >> ~/.zshrc",
        "distdl completion fish > ~/.config/fish/completions/distdl.fish",
    )
    parser.add_argument("shell", choices=sorted(_SCRIPTS))
    parser.set_defaults(command=_completion)


def _completion(options: argparse.Namespace) -> int:
    print(_SCRIPTS[options.shell](options.whole), end="")
    return 0


def _parsers(parser: argparse.ArgumentParser, place: Place = ()) -> Iterator[tuple[Place, argparse.ArgumentParser]]:
    """Yield a parser and those of its commands, each with the words that lead to it."""
    yield place, parser
    for name, one in _commands(parser).items():
        yield from _parsers(one, (*place, name))


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def _bash(whole: argparse.ArgumentParser) -> str:
    places, nested = list[str](), list[str]()
    values: dict[str, Iterable[object]] = {}
    for place, parser in _parsers(whole):
        words = list(_commands(parser))
        nested += place if words and place else ()
        for action in parser._actions:
            words += action.option_strings
            if action.choices and not isinstance(action, argparse._SubParsersAction):
                words += [] if action.option_strings else action.choices
                values.update(dict.fromkeys(action.option_strings, action.choices))
        places.append(f'    "{" ".join(place)}") words="{" ".join(words)}";;')
    cases = [f'    {option}) words="{" ".join(map(str, choices))}";;' for option, choices in values.items()]
    return _BASH.format(nested="|".join(nested), places="\n".join(places), values="\n".join(cases))


def _zsh(whole: argparse.ArgumentParser) -> str:
    return _ZSH + _bash(whole)


def _fish(whole: argparse.ArgumentParser) -> str:
    lines = []
    for place, parser in _parsers(whole):
        condition = f"__fish_seen_subcommand_from {place[-1]}" if place else "__fish_use_subcommand"
        begin = f"complete -c distdl -n '{condition}'"
        for action in parser._actions:
            words = f" -d {_quoted(action.help)}" if action.help else ""
            names = "".join(f" -{'l' if one[:2] == '--' else 's'} {one.lstrip('-')}" for one in action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                lines += [f"{begin} -f -a {one.dest} -d {_quoted(one.help)}" for one in action._choices_actions]
            elif names or action.choices:
                given = f" -x -a {_quoted(' '.join(map(str, action.choices)))}" if action.choices else ""
                lines.append(f"{begin}{names}{given or (' -r' if action.nargs != 0 else '')}{words}")
    return "\n".join([*lines, ""])


def _quoted(text: str | None) -> str:
    return "'" + (text or "").replace("\\", "\\\\").replace("'", "\\'") + "'"


_SCRIPTS = {"bash": _bash, "fish": _fish, "zsh": _zsh}
