"""The errors that a user can fix. Each message has the given value, the rule and the fix.

Raise one of these for anything that a user can fix. Use `assert` with a message for mistakes in
this package.
"""

import os
from collections.abc import Sequence


class MegatronError(Exception):
    """Base class of all errors that a user can fix. Entry points print them without a traceback."""


class ConfigError(MegatronError):
    """The configuration has an unknown flag, breaks a rule, or is in a file that cannot be read."""


class DataError(MegatronError):
    """A data set or text file is missing, damaged, of another format, or does not fit the model."""


class CheckpointError(MegatronError):
    """A checkpoint is missing, damaged, or belongs to another model or run."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, cut off or altered."""

    def __init__(self, message: str, file: str) -> None:
        """Create the error with a message and the name of the damaged file."""
        super().__init__(message)
        self.file = file
        """Name of the damaged file in the folder of the checkpoint. Empty if it is not known."""


class LayoutError(MegatronError):
    """The ranks disagree, or the number of ranks does not fit the requested parallel layout."""


class LostRanksError(MegatronError):
    """A collective failed. The message names the ranks that do not answer or have ended."""


class HungRanksError(LostRanksError):
    """A phase exceeded `--hang-timeout`. The message names the ranks that the others wait for."""

    def __init__(self, message: str, hosts: Sequence[str] = ()) -> None:
        """Create the error with a message and the hosts of the ranks that the others wait for."""
        super().__init__(message)
        self.hosts = tuple(hosts)
        """Hosts of the ranks that the others wait for. Empty if this rank does not know them."""


class TrainingError(MegatronError):
    """Training cannot continue, because of too many NaN losses or a violated invariant."""


class FaultyHostError(TrainingError):
    """A device has computed other numbers than before. The message names the rank."""

    def __init__(self, message: str, hosts: Sequence[str] = ()) -> None:
        """Create the error with a message and the hosts that must not be used any more."""
        super().__init__(message)
        self.hosts = tuple(hosts)
        """Hosts to exclude. Empty if the user did not ask for it."""


class OperationsError(MegatronError):
    """A tool for operating runs has failed, such as a rollback, a sync or a query of the queue."""


MOST_ERRORS = 50
"""Errors that a message lists. A file of another kind could give one for each line."""
LONGEST_MESSAGE = 1200


def combine_errors(errors: Sequence[str]) -> ConfigError:
    """Return one error that lists the messages, up to a number and a length of each."""
    shown = [leave_out_middle(error) for error in errors[:MOST_ERRORS]]
    if len(errors) == 1:
        return ConfigError(shown[0])
    if len(errors) > MOST_ERRORS:
        shown.append("and more")
    return ConfigError("\n  - ".join([f"{len(errors)} errors in the configuration:", *shown]))


def leave_out_middle(text: str) -> str:
    """Return a message without its middle if it is too long. Its end has the rule, and is kept."""
    if len(text) <= LONGEST_MESSAGE:
        return text
    half = LONGEST_MESSAGE // 2
    return f"{text[:half]} ... {text[-half:]}"


def describe_os_error(error: OSError) -> str:
    """Return the name of the file that an error is about, and the system's message."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{os.fsdecode(error.filename)}: {error.strerror}"


_SENT = (
    ConfigError,
    DataError,
    CheckpointError,
    LayoutError,
    TrainingError,
    OperationsError,
)
"""Classes of the errors that rank 0 sends to the other ranks."""


def make_error(kind: str, message: str) -> MegatronError:
    """Return the error that another rank has sent, from the name of its class and its message."""
    for known in _SENT:
        if known.__name__ == kind:
            return known(message)
    return MegatronError(message)
