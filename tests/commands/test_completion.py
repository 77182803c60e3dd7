"""``distdl completion`` and the help: every command and option is offered, by bash itself."""

import argparse
import subprocess

import pytest

from distdl.__main__ import COMMANDS, main, parser


def script(capsys, shell):
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("typed", "offered"), [
    (["distdl", ""], {*COMMANDS, "-h", "--help", "--version"}), (["distdl", "su"], {"summary", "suggest"}),
    (["distdl", "run", "--b"], {"--backend"}), (["distdl", "draw", "all-"], {"all-gather", "all-sum-reduce"}),
    (["distdl", "draw", "conv", "--st"], {"--stride"}),
    (["distdl", "completion", ""], {"bash", "fish", "zsh", "-h", "--help"}),
    (["distdl", "verify", "--weights", ""], {"replicated", "sharded"}), (["distdl", "run", "train"], set()),
])  # fmt: skip
def test_bash_completes(capsys, typed, offered):
    words = " ".join(f"'{word}'" for word in typed)
    ask = f"COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _distdl; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(
        ["bash", "-euc", f"{script(capsys, 'bash')}\n{ask}"], capture_output=True, text=True, timeout=20
    )
    assert (set(done.stdout.split()), done.stderr) == (offered, "")


def test_zsh_takes_the_script_of_bash(capsys):
    assert script(capsys, "zsh").endswith(script(capsys, "bash"))


def test_fish_is_told_of_each_command_and_option(capsys):
    lines = script(capsys, "fish").splitlines()
    for name in COMMANDS:
        assert any(f"'__fish_use_subcommand' -f -a {name} -d" in line for line in lines), name
    assert "complete -c distdl -n '__fish_seen_subcommand_from conv' -l kernel -r -d" in "\n".join(lines)
    (weights,) = [line for line in lines if "from verify' -l weights" in line]
    assert "-x -a 'replicated sharded'" in weights
    assert all(line.count("'") % 2 == 0 for line in lines if "\\'" not in line)


def test_the_help_of_each_command_has_examples_that_it_takes():
    (commands,) = (one for one in parser()._actions if isinstance(one, argparse._SubParsersAction))
    assert list(commands.choices) == list(COMMANDS)
    for name, one in commands.choices.items():
        examples = [line.partition(" > ")[0].partition(" >> ")[0].split() for line in one.format_help().splitlines()]
        examples = [words for words in examples if words[:2] == ["distdl", name]]
        assert examples and all(parser().parse_args(words[1:]).command for words in examples), name
