"""The command line: ``python -m ddp_trainer [COMMAND] [key=value …]``, also under torchrun."""

import faulthandler
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper

from ddp_trainer import registry
from ddp_trainer.commands import COMMANDS
from ddp_trainer.distributed.environment import end_with_launcher, limit_spinning, plugin_modules


def main() -> None:
    """Run the command that ``sys.argv`` names, or `train` if ``sys.argv`` names no command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # SIGINT ends the process until a training handles it, because some imports ignore a
        # KeyboardInterrupt.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if isinstance(sys.stdout, TextIOWrapper):
        # like stderr: a name may hold bytes that are not UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    end_with_launcher()
    limit_spinning()
    command, words = split_command(sys.argv[1:])
    if command in ("", "train"):
        # to stderr, until the job collects the stacks of all ranks
        faulthandler.register(signal.SIGQUIT, file=2)
    from ddp_trainer.commands.command_line import errors_as_exit_codes  # imports Hydra

    with errors_as_exit_codes():
        registry.load_plugins(plugin_modules())
    if not command and words in (["--help"], ["-h"]):
        return print_overview()
    import_module(f"ddp_trainer.commands.{(command or 'train').replace('-', '_')}").main(words)


def split_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command, "" if `words` name none, and its words; exit with 2 if it is unknown."""
    if not words or words[0].startswith(("-", "+", "~")) or "=" in words[0]:
        return "", list(words)
    if words[0] in COMMANDS:
        return words[0], list(words[1:])
    near = get_close_matches(words[0], COMMANDS, n=1)
    hint = (
        f"did you mean {near[0]}?"
        if near
        else f"choose from {', '.join(COMMANDS)}, or set a key with key=value"
    )
    print(f"error: {words[0]} is not a command: {hint}", file=sys.stderr)
    sys.exit(2)


def print_overview() -> None:
    """Print all commands, and the choices of each config group."""
    from ddp_trainer.config.composition import config_dir  # imports Hydra

    print("Train an image classifier with PyTorch DistributedDataParallel.\n")
    print("  python -m ddp_trainer [COMMAND] [key=value …]")
    print("  torchrun --nproc_per_node=N -m ddp_trainer [COMMAND] [key=value …]\n\ncommands:")
    for name, description in COMMANDS.items():
        print(f"  {name:12} {description}")
    print("\ngroups (choose with group=choice):")
    choices = {group: list(registry.choices(group)) for group in registry.GROUPS}
    choices["experiment"] = sorted(path.stem for path in config_dir().glob("experiment/*.yaml"))
    for group, names in choices.items():
        print(f"  {group:12} {', '.join(names)}")
    print(
        "\nCOMMAND --help lists a command's options; train --help lists all keys of the config."
        " Guide: README.md"
    )


if __name__ == "__main__":
    main()
