"""Every error a user can meet, drawn once.

    PipelineError                 exit code 2, one paragraph
    ├── ConfigError               a field of the configuration: unknown, missing, of the wrong type, or contradicting another
    ├── LaunchError               the processes that run are not those that were asked for
    │   ├── PeerFailedError       another rank failed, and says why; this one only ends with it
    │   └── StoppedError          SIGTERM asked the run to end; exit code 143, and the same command goes on
    ├── CorpusError               a corpus that cannot be read, or nothing usable in it
    │   └── TemplateError         a chat template whose assistant turns cannot be located
    ├── RegenerateError           answers that no server gives, or a folder that holds answers of another run
    ├── TargetError               a target that cannot be loaded, split or captured as asked
    │   └── HiddenStateError      states that are not finite, all zero or constant
    ├── CacheError                a cache that cannot be written or read
    │   ├── CacheCorruptError     a file of a cache is missing, short or altered
    │   ├── CacheMismatchError    a cache that was captured from something else than this run names
    │   └── CacheLockedError      another process writes what this one was asked to write
    ├── DraftError                a draft whose geometry, mask token or layers cannot work
    ├── CheckpointError           a checkpoint that is damaged or belongs to another run
    ├── TrainingError             a run that cannot go on: a loss that is not finite, no usable sample
    │   └── DiskError             the disk does not take what a run writes beside its checkpoints
    └── BenchError                a measurement that cannot be made here

A message says what was found, what was expected, where, and what to do. Anything that is not a `PipelineError` is a bug
and keeps its traceback.
"""


class PipelineError(Exception):
    """Root of all errors that a user can cause and mend."""


class ConfigError(PipelineError):
    """The configuration is not usable; the message lists every fault that was found in it."""


class LaunchError(PipelineError):
    """World size, rank or device is not what the launch command or the configuration asked for."""


class PeerFailedError(LaunchError):
    """Another rank of this launch failed; the message repeats its reason."""


class StoppedError(LaunchError):
    """The run was asked to end by SIGTERM, and ended in good order."""

    exit_code = 143  # as a shell has it for a process that the signal itself ended


class CorpusError(PipelineError):
    """The corpus cannot be read, or holds nothing that can be trained on."""


class TemplateError(CorpusError):
    """The chat template does not let the assistant's tokens be located."""


class RegenerateError(PipelineError):
    """No server can be asked, or the folder of answers was begun with other settings or prompts."""


class TargetError(PipelineError):
    """The target cannot be loaded, sharded over the ranks, or run as asked."""


class HiddenStateError(TargetError):
    """A sample's hidden states are not finite, all zero, or the same at every position."""


class CacheError(PipelineError):
    """The cache cannot be written or read."""


class CacheCorruptError(CacheError):
    """A file of the cache is missing, shorter than recorded, or has another checksum."""


class CacheMismatchError(CacheError):
    """The identity of the cache and that of the run differ; the message lists the fields."""


class CacheLockedError(CacheError):
    """Another live process holds the part of the cache that this one was asked to write."""


class DraftError(PipelineError):
    """The draft's geometry, mask token or target layers cannot work."""


class CheckpointError(PipelineError):
    """The checkpoint is damaged, or was written by a run with other settings."""


class TrainingError(PipelineError):
    """Training cannot start or go on."""


class DiskError(TrainingError):
    """The disk does not take metrics, an export or another file of a run; the run is not to blame, and goes on once that is mended."""


class BenchError(PipelineError):
    """What was to be measured cannot be: a program that it is compared with is missing or failed, or there is too little to measure on."""
