"""TAB completion of the command: verbs, groups, options, keys and recipes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from drivetrain.cli import verbs
from drivetrain.config import catalog
from drivetrain.core.errors import DONE, UserError
from drivetrain.recipe import places
from drivetrain.run import directory
from drivetrain.ui.output import echo, fold

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


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain completion SHELL`: print the script for the shell to evaluate: eval "$(drivetrain completion bash)"."""
    if any(word in ("-h", "--help") for word in argv):
        echo(fold(HELP))
        return DONE
    if len(argv) != 1 or argv[0] not in SCRIPTS:
        raise UserError('drivetrain completion needs bash, zsh or fish; then: eval "$(drivetrain completion bash)"')
    echo(SCRIPTS[argv[0]], end="")
    return DONE


def complete(words: Sequence[str], last: str) -> Sequence[str]:
    """The words that TAB offers after `drivetrain completion`: the shells."""
    return [*SCRIPTS]


def print_candidates(argv: Sequence[str]) -> int:
    """Run `drivetrain complete LINE`, which the scripts call: print what the last word of the line may become."""
    echo("\n".join(candidates(argv)))
    return DONE


def candidates(argv: Sequence[str]) -> list[str]:
    """The words that the last word of a command line may become."""
    line = argv[0] if argv else ""
    words = line.split()[1:]
    last = "" if line.endswith(" ") or not words else words.pop()
    if not words:
        offered = [verb.name for verb in verbs.all_verbs().values() if verb.help]
    else:
        verb = verbs.find(words[0])
        offered = overrides(words[1:], last) if verb.takes_overrides else verb.complete(words[1:], last)
    return [word for word in offered if word.startswith(last)]


def runs() -> list[str]:
    """The newest runs below outputs/."""
    return [str(path) for path in directory.newest_first(Path("outputs"))[:50]]


def overrides(words: Sequence[str], last: str) -> list[str]:
    """The words that an override that begins with `last` may become, after the words before it."""
    if last.startswith("hy"):
        from drivetrain.sweeps.options import completions

        return completions()
    config_dirs = list(_config_dirs(words))
    groups = catalog.options(config_dirs)
    key, equals, value = last.partition("=")
    if equals:
        names = groups.get(key, []) if key != "recipe" else places.names()
        head = value[: value.rfind(",") + 1]  # of a sweep: precision=fp32,b…
        return [f"{key}={head}{name}" for name in names]
    group = key.split(".")[0]
    if "." in key and group in groups:
        return sorted(f"{group}.{setting}=" for setting in _settings(group, groups[group], config_dirs))
    values = [name for name in catalog.root_config() if name != "defaults"]
    return [f"{name}=" for name in [*groups, *values]] + [f"{group}." for group in groups]


def _settings(group: str, options: Sequence[str], config_dirs: Sequence[str]) -> set[str]:
    """The settings of all options of a group; where several are chosen at once, each below its option's name."""
    keys = {option: catalog.option_keys(group, option, config_dirs) - {"_target_"} for option in options}
    return {f"{option}.{key}" if group in catalog.LISTS else key for option, names in keys.items() for key in names}


def _config_dirs(words: Sequence[str]) -> Iterator[str]:
    """The folders that the words before give by -cd DIR or --config-dir[=]DIR."""
    for i, word in enumerate(words):
        if word in ("-cd", "--config-dir"):
            yield from words[i + 1 : i + 2]
        elif word.startswith("--config-dir="):
            yield word.partition("=")[2]
