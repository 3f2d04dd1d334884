"""Words that a shell offers for a command line of `largebatch`, made of the options: one script for each shell."""

from collections.abc import Iterable, Iterator, Mapping

from largebatch.config.help import ALIASES, COMMON, Option, all_options, sections
from largebatch.config.sections import TrainConfig
from largebatch.config.values import choices

SHELLS = ("bash", "zsh", "fish")
OF_RUNS = ("train", "validate")  # the programs that take the options of a run
WORDS = {
    "pack": "check token-labels",
    "report": "diff",
    "benchmark": "optimizer loader model step parallel scaling",
    "reproduce": "digits cifar10 --quick --data --optimizers --batches --epochs --rates --seeds --processes --output",
    "plan": "validate --gpus --gpu --gpus-per-host --network --calibrate --search --json --picture",
    "doctor": "--device --hosts --data --print --limit-s",
}
BASH = """\
# Words for `largebatch` in {shell}. Put this line into {file}:  eval "$(largebatch --completion {shell})"
{first}_largebatch() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} offered=""
    case $COMP_CWORD:${{COMP_WORDS[1]}} in
        1:*) offered="{programs} --help --version --completion" ;;
        *:train | *:validate)
            case $before in
{values}
                *) case $word in -*) offered="{options}" ;; esac ;;
            esac ;;
{others}
    esac
    COMPREPLY=($(compgen -W "$offered" -- "$word"))
}}
complete -o default -F _largebatch largebatch   # default: names of files, where there are no words"""


def script(shell: str, programs: Mapping[str, str]) -> str:
    """Return the script of a shell; programs: each with a sentence."""
    options = all_options(TrainConfig())
    if shell == "fish":
        return "\n".join(_fish(programs, options.values()))
    zsh = shell == "zsh"
    named = {name: choices(option.kind) for name, option in options.items()} | {"help": ["all", *sections()]}
    return BASH.format(
        shell=shell,
        file="~/.zshrc" if zsh else "~/.bashrc",
        first="autoload -U +X bashcompinit && bashcompinit\n" if zsh else "",
        programs=" ".join(programs),
        options=" ".join(f"--{name}" for name in [*ALIASES, *options, *_common()]),
        values="\n".join(f'{" " * 16}--{name}) offered="{" ".join(of)}" ;;' for name, of in named.items() if of),
        others="\n".join(f'{" " * 8}*:{name}) offered="{words}" ;;' for name, words in WORDS.items()),
    )


def _common() -> list[str]:
    """Return the names of the options that are no options of a run."""
    return [usage.split()[0].lstrip("-") for usage in COMMON]


def _fish(programs: Mapping[str, str], options: Iterable[Option]) -> Iterator[str]:
    """Yield the lines for fish; each option has its meaning beside it."""
    yield "# Words for `largebatch` in fish. Put this line into ~/.config/fish/config.fish:"
    yield "#   largebatch --completion fish | source"
    first = "complete -c largebatch -n 'test (count (commandline -opc)) -eq 1'"
    for name, text in programs.items():
        yield f"{first} -f -a {name} -d {_quoted(text)}"
    for name in ("help", "version"):
        yield f"{first} -l {name}"
    for program, words in WORDS.items():
        yield f"complete -c largebatch -n '__fish_seen_subcommand_from {program}' -a {_quoted(words)}"
    runs = f"complete -c largebatch -n '__fish_seen_subcommand_from {' '.join(OF_RUNS)}'"
    for option in options:
        words = f" -f -a {_quoted(' '.join(choices(option.kind)))}" if choices(option.kind) else ""
        for name in option.names:
            yield f"{runs} -l {name} -r{words} -d {_quoted(option.text)}"
    for name in _common():
        yield f"{runs} -l {name}" + (f" -f -r -a {_quoted(' '.join(['all', *sections()]))}" if name == "help" else "")


def _quoted(text: str) -> str:
    """Return a text as one word of fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
