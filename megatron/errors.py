"""The errors a user can meet. Each message says what was given, the rule, and the way out.

`raise` one of these for anything a user can cause; `assert` with a message is for our own mistakes.
"""


class MegatronError(Exception):
    """Base of all errors that are the user's to mend; entry points print it without a traceback."""


class ConfigError(MegatronError):
    """The configuration cannot be run: unknown flag, failed rule, unreadable file."""


class DataError(MegatronError):
    """A data set or text file is missing, damaged, foreign, or does not fit the model."""


class CheckpointError(MegatronError):
    """A checkpoint is missing, damaged, or belongs to another model or run."""


class DamagedError(CheckpointError):
    """What is stored is not what was written: a file is missing, cut off or altered."""

    def __init__(self, message: str, file: str) -> None:
        super().__init__(message)
        self.file = file
        """Its name in the checkpoint's folder."""


class LayoutError(MegatronError):
    """The ranks disagree, or the world does not fit the requested parallel layout."""


class LostRanksError(MegatronError):
    """A collective failed. The message names the ranks that do not answer or have left."""


class TrainingError(MegatronError):
    """Training cannot go on: too many NaN losses, or an invariant was violated."""


class OperationsError(MegatronError):
    """A tool around a run cannot do what it was asked: a rollback, a sync, a look at the queue."""
