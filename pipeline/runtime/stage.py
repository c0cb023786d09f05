"""What every stage does alike: argv to configuration to one call to an exit code.

No torch is imported here, so that `--help` and a faulty configuration answer at once; a stage's `main` imports what it needs.
"""

import gc
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from pipeline.config.load import Stage, describe_fields, load_config
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, PipelineError, StoppedError
from pipeline.runtime.logs import log_to_file, setup_logs

log = logging.getLogger(__name__)

Main: TypeAlias = Callable[[Config], None]


def run_stage(stage: Stage, main: Main | Mapping[str, Main], argv: Sequence[str], options: Mapping[str, Main] | None = None) -> int:
    """Run `main` with the configuration that `argv` (without the program's name) gives, and return the exit code.

    `argv` is `CONFIG [a.b=c …]`; where `main` is a mapping, the name of one of its entries comes first. An option, such as `--plan`, names
    what runs in place of `main`. A `PipelineError` becomes one paragraph on stderr and exit code 2 (143 when SIGTERM ended the run);
    any other exception is a bug and passes through with its traceback.
    """
    rank = int(os.environ.get("RANK", "0"))
    setup_logs(rank, None)
    for option, other in (options or {}).items():
        if option in argv:
            main, argv = other, [argument for argument in argv if argument != option]
    if any(argument in ("-h", "--help") for argument in argv):
        _print_help(main)
        return 0
    try:
        call, path, overrides = _parse(main, argv)
        call(load_config(stage, path, overrides))
    except StoppedError as error:
        log.warning("%s", error)
        return error.exit_code
    except PipelineError as error:
        log_to_file(str(error))
        # A faulty configuration is the same on every rank, so one of them says it; other errors may be one rank's own.
        if rank == 0 or not isinstance(error, ConfigError):
            print(f"error{f' on rank {rank}' if rank else ''}: {error}", file=sys.stderr, flush=True)
        return 2
    except Exception:
        log_to_file("stopped by an error that is not the user's", with_traceback=True)
        raise
    finally:
        if "WORLD_SIZE" in os.environ:
            gc.collect()  # a device mesh that lives until the interpreter ends can abort it there (torch 2.13, gloo)
    return 0


def _parse(main: Main | Mapping[str, Main], argv: Sequence[str]) -> tuple[Main, str, Sequence[str]]:
    arguments = list(argv)
    call = main
    if isinstance(call, Mapping):
        if not arguments or arguments[0] not in call:
            given = f"found {arguments[0]!r}" if arguments else "found nothing"
            raise ConfigError(f"{given}, expected one of: {', '.join(call)}\n{_usage(main)}")
        call = call[arguments.pop(0)]
    if not arguments:
        raise ConfigError(f"no configuration file is given\n{_usage(main)}")
    for argument in arguments:
        if argument.startswith("-"):
            raise ConfigError(f"unknown option {argument}; settings are given as a.b=value\n{_usage(main)}")
    if "=" in arguments[0]:
        raise ConfigError(f"found {arguments[0]!r} where the configuration file should be\n{_usage(main)}")
    return call, arguments[0], arguments[1:]


def _usage(main: Main | Mapping[str, Main]) -> str:
    command = f" {{{','.join(main)}}}" if isinstance(main, Mapping) else ""
    return f"usage: {os.path.relpath(sys.argv[0])}{command} CONFIG.yaml [a.b=value …]"


def _print_help(main: Main | Mapping[str, Main]) -> None:
    try:
        print(_help(main), flush=True)
    except BrokenPipeError:  # `--help | head`: Python would complain once more when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _help(main: Main | Mapping[str, Main]) -> str:
    named = main if isinstance(main, Mapping) else {"": main}
    described = [(name, " ".join((call.__doc__ or "").split())) for name, call in named.items()]
    lines = [f"  {name:<10} {text}" if name else text for name, text in described if text]
    return "\n".join([_usage(main), "", *lines, *[""] * bool(lines), "Fields, with type, default and meaning:", describe_fields()])
