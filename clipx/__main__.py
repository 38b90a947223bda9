"""`clipx NAME …`, also `python -m clipx NAME …`: runs a command, as `python -m` runs its module, or lists the commands.

Imports nothing else before the command does: `clipx.train` handles signals first.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from clipx.commands import commands, module_of, refuse, run, summary_of

_HELP = """\
clipx trains CLIP models. clipx COMMAND --help explains a command. The first to try needs no data: clipx train

{commands}

`python -m MODULE` starts a command as well. --version prints the versions of clipx, torch, Hydra and Python, and
-sc install=bash the code of tab completion."""
_COMPLETION = """\
_clipx() {
    local word="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" choices="" line
    if [ "$COMP_CWORD" -eq 1 ]; then
        choices="NAMES"
    elif [ "$command" != sweep ]; then
        line="clipx-$command ${COMP_LINE#*"$command" }"
        choices=$(COMP_LINE="$line" COMP_POINT="${#line}" "${COMP_WORDS[0]}" "$command" -sc query=bash 2> /dev/null)
    fi
    COMPREPLY=($(compgen -o nospace -o default -W "$choices" -- "$word"))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=} # an override is one word, as for Hydra's own completion
complete -o nospace -o default -F _clipx clipx
"""


def main() -> None:
    """Runs the command that the first word names, as `python -m` would, or prints the commands or the versions."""
    words = sys.argv[1:]
    module = module_of(words[0]) if words else None
    if module is not None:
        sys.argv = words
        run(words[0], module)
        return
    from clipx.cli import with_output

    if words == ["--version"]:
        from clipx.version import version_text

        text = version_text()
    elif words in (["-sc", "install=bash"], ["--shell-completion", "install=bash"]):
        text = _COMPLETION.replace("NAMES", " ".join(commands()))
    elif words in ([], ["--help"], ["-h"]):
        text = _HELP.format(commands="\n".join(_line(*command) for command in commands().items()))
    else:
        _refuse(words)
    with with_output():
        print(text)


def _line(name: str, module: str) -> str:
    return f"  {name:<12} {module:<18} {summary_of(module)}"


def _refuse(words: list[str]) -> NoReturn:
    from clipx.config.suggestions import did_you_mean

    word = words[0]
    if word in ("-sc", "--shell-completion"):
        refuse(
            f"{' '.join(words)} is not a choice: write -sc install=bash, or clipx-train {' '.join(words)} for a command"
        )
    if word.startswith("-"):
        command = next(filter(module_of, words), "COMMAND")
        refuse(f"{word} is not a command: write it after the command, clipx {command} {word}")
    if "=" in word:
        refuse(f"{word} is not a command: write clipx COMMAND {word}, for example clipx train {word}")
    refuse(f"{word} is not a command{did_you_mean(word, list(commands()))}: clipx --help lists them")


if __name__ == "__main__":
    main()
