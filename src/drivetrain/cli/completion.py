"""TAB completion of the console script: verbs, groups, options, knobs, recipes."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.config.compose import options
from drivetrain.core.errors import DONE, UserError
from drivetrain.core.paths import conf_dir
from drivetrain.recipe import reader as recipe

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


def install(argv: Sequence[str]) -> int:
    """Print the script that a shell is to evaluate: eval "$(drivetrain completion bash)"."""
    if len(argv) != 1 or argv[0] not in SCRIPTS:
        raise UserError('drivetrain completion wants bash, zsh or fish; then: eval "$(drivetrain completion bash)"')
    print(SCRIPTS[argv[0]], end="")
    return DONE


def candidates(argv: Sequence[str]) -> list[str]:
    """What the last word of a command line may become."""
    line = argv[0] if argv else ""
    words = line.split()[1:]
    last = "" if line.endswith(" ") or not words else words.pop()
    if not words:
        from drivetrain.cli.main import VERBS

        offered = [verb for verb, (_, text) in VERBS.items() if text]
    elif words[0] in ("train", "show", "pack", "compare", "ablate", "doctor", "tune"):
        offered = _overrides(last)
    elif words[0] == "list":
        offered = list(options())
    elif words[0] == "recipe":
        offered = _of_recipe(words[1:], last)
    elif words[0] == "completion":
        offered = list(SCRIPTS)
    else:
        offered = []
    return [word for word in offered if word.startswith(last)]


def _of_recipe(words: Sequence[str], last: str) -> list[str]:
    """A verb, then the names it takes, then the overrides where it takes any."""
    from drivetrain.cli.recipe import VERBS

    if not words:
        return list(VERBS)
    names = {"verify": 1, "diff": 2}.get(words[0])
    return recipe.shipped() if names is None or len(words) <= names else _overrides(last)


def _overrides(last: str) -> list[str]:
    from omegaconf import OmegaConf

    if last.startswith("hy"):
        from drivetrain.sweep.options import completions

        return completions()
    groups = options()
    key, equals, value = last.partition("=")
    if equals:
        names = groups.get(key, []) if key != "recipe" else recipe.shipped()
        head = value[: value.rfind(",") + 1]  # a sweep: precision=fp32,b…
        return [f"{key}={head}{name}" for name in names]
    if "." in key and key.split(".")[0] in groups:
        group = key.split(".")[0]
        knobs = {str(k) for o in groups[group] for k in OmegaConf.load(conf_dir() / group / f"{o}.yaml")}
        return sorted(f"{group}.{knob}=" for knob in knobs if knob != "_target_")
    values = [str(k) for k in OmegaConf.load(conf_dir() / "config.yaml") if k != "defaults"]
    return [f"{name}=" for name in [*groups, *values]] + [f"{group}." for group in groups]
