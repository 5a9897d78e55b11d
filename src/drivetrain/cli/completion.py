"""TAB completion of the command: verbs, groups, options, keys and recipes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from drivetrain.cli import verbs
from drivetrain.cli.arguments import Command
from drivetrain.core.errors import DONE, UserError
from drivetrain.ui.output import echo

HELP = """\
drivetrain completion SHELL      the script by which TAB completes verbs, groups, options, keys and recipes

  eval "$(drivetrain completion bash)"                       for this shell; put the line into ~/.bashrc to keep it
  eval "$(drivetrain completion zsh)"                        the same in ~/.zshrc
  drivetrain completion fish > ~/.config/fish/completions/drivetrain.fish
"""
BASH = """\
_drivetrain() {
    local IFS=$'\\n' line="${COMP_LINE:0:COMP_POINT}"
    COMPREPLY=($(drivetrain complete "$line" 2>/dev/null))
    [[ ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace 2>/dev/null
    # readline splits words at "=": offer only what comes after it
    local word="${line##* }"
    [[ $word == *=* && $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%=*}="}")
}
complete -F _drivetrain drivetrain
"""
SCRIPTS = {
    "bash": BASH,
    "zsh": "autoload -U +X bashcompinit && bashcompinit\n" + BASH,
    "fish": "complete -c drivetrain -f -a '(drivetrain complete (commandline -cp))'\n",
}


def _print_script(given: argparse.Namespace) -> int:
    if len(given.overrides) != 1 or given.overrides[0] not in SCRIPTS:
        raise UserError('drivetrain completion needs bash, zsh or fish; then: eval "$(drivetrain completion bash)"')
    echo(SCRIPTS[given.overrides[0]], end="")
    return DONE


command = Command("completion", _print_script, HELP, takes_paths=True, offers=lambda *_: [*SCRIPTS])


def print_candidates(argv: Sequence[str]) -> int:
    """Run `drivetrain complete LINE` for the scripts: print the completions of the line's last word."""
    echo("\n".join(candidates(argv)))
    return DONE


def candidates(argv: Sequence[str]) -> list[str]:
    """The completions of a command line's last word."""
    line = argv[0] if argv else ""
    words = line.split()[1:]
    last = "" if line.endswith(" ") or not words else words.pop()
    if not words:
        offered = [verb.name for verb in verbs.all_verbs().values() if verb.help]
    else:
        offered = verbs.find(words[0]).complete(words[1:], last)
    return [word for word in offered if word.startswith(last)]
