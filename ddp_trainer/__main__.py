"""The command line: ``python -m ddp_trainer [COMMAND] [key=value …]``, also under torchrun."""

import faulthandler
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from io import TextIOWrapper

from ddp_trainer import registry
from ddp_trainer.commands import COMMANDS
from ddp_trainer.config.errors import ConfigError, suggestion
from ddp_trainer.config.plugins import load_plugins
from ddp_trainer.distributed.environment import end_with_launcher, limit_spinning, plugin_modules

WAIT_SECONDS = 5.0
"""How long a process waits at its end for threads before it warns of them."""


def main() -> None:
    """Run the command that ``sys.argv`` names, or `train` if ``sys.argv`` names no command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # SIGINT ends the process until a training handles it, because some imports ignore a
        # KeyboardInterrupt.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if isinstance(sys.stdout, TextIOWrapper):
        # like stderr, because a file name may have bytes that are not UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    end_with_launcher()
    limit_spinning()
    command, words = split_command(sys.argv[1:])
    if command in ("", "train"):
        # SIGQUIT prints the stacks to stderr, until `StackFile` replaces this handler
        faulthandler.register(signal.SIGQUIT, file=2)
    from ddp_trainer.commands.command_line import command_output, errors_as_exit_codes  # Hydra

    with errors_as_exit_codes():
        try:
            os.getcwd()
        except FileNotFoundError as error:
            reason = "the current directory does not exist any more: cd to another directory"
            raise ConfigError(reason) from error
        load_plugins(plugin_modules())
    # A training goes on without its stdout.
    is_training = command in ("", "train") and not {"--help", "-h"} & {*words}
    with nullcontext() if is_training else command_output():
        run_module(command, words)


def run_module(command: str, words: Sequence[str]) -> None:
    """Run the command, `train` if it is ""; for --help alone, print the overview."""
    from ddp_trainer.commands.command_line import errors_as_exit_codes

    if not command and words in (["--help"], ["-h"]):
        return print_overview()
    with errors_as_exit_codes():
        module = import_module(f"ddp_trainer.commands.{(command or 'train').replace('-', '_')}")
    module.main(words)
    warn_of_threads()


def warn_of_threads() -> None:
    """Warn of the threads for which this process waits, if it has not ended `WAIT_SECONDS` later.

    Python waits at its end for all threads that are no daemons, for example those of a plug-in.
    """

    def watch() -> None:
        time.sleep(WAIT_SECONDS)
        waiting = {thread for thread in threading.enumerate() if not thread.daemon}
        names = [thread.name for thread in waiting - {threading.main_thread()}]
        if names:
            reason = f"and waits for the threads {', '.join(names)}: start them with daemon=True"
            print(f"process {os.getpid()} has done its work, {reason}", file=sys.stderr, flush=True)

    threading.Thread(target=watch, daemon=True).start()


def split_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command ("" if there is none) and its arguments; exit with 2 if it is unknown."""
    for number in range(len(words)):
        if setting := joined(*[*words[number:], "", ""][:3]):
            print(f"error: no spaces around =: write {shlex.quote(setting)}", file=sys.stderr)
            sys.exit(2)
    if not words or words[0].startswith(("-", "+", "~")) or "=" in words[0]:
        return "", list(words)
    if words[0] in COMMANDS:
        return words[0], list(words[1:])
    hint = suggestion(words[0], COMMANDS)
    fix = f": choose from {', '.join(COMMANDS)}, or set a key with key=value"
    print(f"error: {words[0]} is not a command{hint or fix}", file=sys.stderr)
    sys.exit(2)


def joined(word: str, after: str, value: str) -> str:
    """Return ``key=value`` if three words, or the first alone, have it with spaces; "" if not."""
    if after == "=":
        return f"{word}={value or 'VALUE'}"
    is_value = bool(after) and "=" not in after and not after.startswith("-")
    if after.startswith("=") or (word.endswith("=") and is_value):
        return word + after
    is_one_word = re.match(r"[\w.@/+]+ +=", word) and not os.path.lexists(word)
    return re.sub(" *= *", "=", word, count=1) if is_one_word else ""


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
