"""What the launch command asked for, read from the launcher's own command line.

`accelerate launch --cpu --num_processes 2` starts one process and leaves nothing in its environment that says two were
wanted. The only witness is the parent process.
"""

import contextlib
import io
import os
from collections.abc import Sequence

import psutil
from accelerate.commands.config import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser

_MODULES = ("accelerate.commands.launch", "accelerate.commands.accelerate_cli")
_OTHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


def asked_processes() -> tuple[int, str] | None:
    """The number of processes over all machines that `accelerate launch` was asked for, and where it says so.

    None without such a launcher, or when it was left to choose by itself.
    """
    try:
        parents = psutil.Process().parents()
    except psutil.Error:
        return None
    for parent in parents:
        try:
            command, folder = parent.cmdline(), parent.cwd()
        except psutil.Error:
            continue
        arguments = launch_arguments(command)
        if arguments is not None:
            return _asked(arguments, folder)
        if any(os.path.basename(token) in _OTHERS for token in command):
            return None
    return None


def launch_arguments(command: Sequence[str]) -> list[str] | None:
    """What follows `accelerate launch` in a command line, however it was spelled; None for any other command."""
    for i, token in enumerate(command):
        name, following = os.path.basename(token), command[i + 1 : i + 2]
        as_module = i > 0 and command[i - 1] == "-m" and token in _MODULES
        if name == "accelerate-launch" or (as_module and token == _MODULES[0]):
            return list(command[i + 1 :])
        if (name == "accelerate" or as_module) and following == ["launch"]:
            return list(command[i + 2 :])
    return None


def _asked(arguments: Sequence[str], folder: str) -> tuple[int, str] | None:
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            options, _ = launch_command_parser().parse_known_args(arguments)
    except SystemExit:
        return None
    if options.num_processes is not None:
        return int(options.num_processes), "--num_processes"
    file = options.config_file or (default_config_file if os.path.isfile(default_config_file) and not options.cpu else None)
    if file is None:
        return None
    file = os.path.join(folder, file)
    try:
        number = load_config_from_file(file).num_processes
    except (OSError, ValueError, AttributeError):
        return None
    return None if number is None or number < 1 else (int(number), f"num_processes of {file}")
