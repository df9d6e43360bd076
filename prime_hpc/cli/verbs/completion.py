"""`prime-hpc completion bash|zsh|fish`: the script that makes Tab work; `eval "$(prime-hpc completion bash)"`.

The scripts hold no words of their own: they ask `prime-hpc completion --words ...` (or `--line ...`), which answers
with a line of directives (`files`, `any`, `dirs`, `nospace`) and a word a line; see `complete`. Exit codes: 0; 2 for a
shell that there is no script for.
"""

import sys

from prime_hpc.cli.common import parse
from prime_hpc.config.errors import ConfigError

BASH = r"""# prime-hpc completion for bash:  eval "$(prime-hpc completion bash)"
_prime_hpc() {
    local program=prime-hpc line=${COMP_LINE:0:COMP_POINT} cur=${COMP_WORDS[COMP_CWORD]} directives word suffix
    [[ ${COMP_WORDS[0]##*/} == prime-hpc ]] && program=${COMP_WORDS[0]/#\~/$HOME}
    [[ -n $line ]] || line="${COMP_WORDS[*]:0:COMP_CWORD+1}"
    local -a answer
    mapfile -t answer < <("$program" completion --line "$line" 2>/dev/null)
    directives=" ${answer[0]} "
    COMPREPLY=()
    # bash breaks words at = and : too, and wants only what comes after the last break
    local broken=${line##*[[:space:]]}
    [[ $cur == [=:] ]] && cur=
    if [[ $broken == *"$cur" ]]; then broken=${broken%"$cur"}; else broken=; fi
    for word in "${answer[@]:1}"; do
        word=${word%%$'\t'*}
        COMPREPLY+=("${word#"$broken"}")
    done
    [[ $directives == *" nospace "* ]] && compopt -o nospace 2>/dev/null
    if [[ $directives == *" files "* || $directives == *" any "* || $directives == *" dirs "* ]]; then
        compopt -o filenames 2>/dev/null
        mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -d -- "$cur")
    fi
    if [[ $directives == *" any "* ]]; then
        mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$cur")
    elif [[ $directives == *" files "* ]]; then
        for suffix in yaml yml toml; do
            mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -X "!*.$suffix" -- "$cur")
        done
    fi
}
complete -F _prime_hpc prime-hpc rl sft trainer orchestrator inference synthesize
"""

ZSH = r"""#compdef prime-hpc rl sft trainer orchestrator inference synthesize
# prime-hpc completion for zsh:  eval "$(prime-hpc completion zsh)"
_prime_hpc() {
    local program=prime-hpc directives line word
    [[ ${words[1]:t} == prime-hpc ]] && program=${words[1]/#\~/$HOME}
    local -a answer plain shown open typed
    typed=("${(@Q)words[1,CURRENT]}")
    typed[-1]=${typed[-1]#[\'\"]}  # an open quote
    answer=("${(@f)$($program completion --words "${(pj:\x1f:)typed}" 2>/dev/null)}")
    directives=" ${answer[1]} "
    for line in "${(@)answer[2,-1]}"; do
        [[ -n $line ]] || continue
        word=${line%%$'\t'*}
        if [[ $word == *. ]]; then
            open+=("$word")
        else
            plain+=("$word")
            if [[ $line == *$'\t'* ]]; then shown+=("$word  -- ${line#*$'\t'}"); else shown+=("$word"); fi
        fi
    done
    local -i found=1
    (( $#open )) && compadd -S '' -a open && found=0
    (( $#plain )) && compadd -l -d shown -a plain && found=0
    if [[ $directives == *" any "* ]]; then
        _files && found=0
    elif [[ $directives == *" files "* ]]; then
        _files -g '*.(yaml|yml|toml)' && found=0
    elif [[ $directives == *" dirs "* ]]; then
        _files -/ && found=0
    fi
    return found
}
if ! (( $+functions[compdef] )); then autoload -Uz compinit && compinit; fi
compdef _prime_hpc prime-hpc rl sft trainer orchestrator inference synthesize
"""

FISH = r"""# prime-hpc completion for fish:  prime-hpc completion fish | source
function __prime_hpc_complete
    set -l current (commandline -ct)
    set -l bare (string trim --left --chars '\'"' -- "$current")
    set -l typed (commandline -opc) "$bare"
    set -l program prime-hpc
    test (basename -- $typed[1]) = prime-hpc; and set program (string replace -r '^~' $HOME -- $typed[1])
    set -l answer ($program completion --words (string join \x1f -- $typed) 2>/dev/null)
    for line in $answer[2..-1]
        echo $line
    end
    if string match -q '*any*' -- $answer[1]
        __fish_complete_path "$current"
    else if string match -q '*files*' -- $answer[1]
        __fish_complete_path "$current" | string match -r '^[^\t]*(?:/|\.yaml|\.yml|\.toml)(?:\t.*)?$'
    else if string match -q '*dirs*' -- $answer[1]
        __fish_complete_directories "$current"
    end
end
for program in prime-hpc rl sft trainer orchestrator inference synthesize
    complete -c $program -f -k -a '(__prime_hpc_complete)'
end
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def run(argv: list[str], program: str) -> int:
    """Print a script, or (for the scripts) the words that may come next."""
    given = parse("completion", argv)
    if given.flags:
        from prime_hpc.cli.complete import complete, split_line

        flags = given.flags
        words = split_line(flags["--line"]) if "--line" in flags else flags["--words"].split("\x1f")
        print(complete(words), end="")
        return 0
    rest = given.arguments(1)
    if not rest or rest[0] not in SCRIPTS:
        asked = f"no script for {rest[0]!r}" if rest else "for which shell?"
        raise ConfigError(f"{asked}; usage: {given.usage}")
    sys.stdout.write(SCRIPTS[rest[0]])
    return 0
