"""Finds the files that --input names, and their formats.

Invariant: the same patterns and the same files on disk give the same list, in the same order.
"""

import glob
import os
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from megatron.base.errors import ConfigError, DataError
from megatron.base.outside_file import load_json
from megatron.base.plain_text import format_count, is_url, redact

_COMPRESSED = (".gz", ".zst")
_TABLES = (".parquet", ".arrow")
_JSON = (".jsonl", ".json", ".ndjson")
_TEXTS = (".txt", ".text", ".md")
# These are text too if they are named. A folder's own README.rst or build.py is no document.
_NAMED_TEXTS = (
    *(".rst", ".tex", ".org", ".adoc", ".log", ".sh", ".sql", ".py", ".js", ".ts", ".go", ".rs"),
    *(".c", ".h", ".cc", ".cpp", ".hpp", ".java", ".rb"),
)
FOLDER_SUFFIXES = tuple(
    suffix + compression
    for suffix in (".parquet", *_JSON, *_TEXTS)
    for compression in ("", *_COMPRESSED)
)
"""Suffixes of the files of a folder that are read."""
# Hugging Face datasets writes these files beside the data of `save_to_disk`.
_STATE = "state.json"
_DATASET_DICT = "dataset_dict.json"


class InputFormat(Enum):
    """How the content of a file is read."""

    JSON = "JSON records"
    PARQUET = "Parquet"
    ARROW = "Arrow"
    TEXT = "plain text"


def find_format(path: str) -> InputFormat:
    """Return the format of a file, which its suffix gives. Any other suffix means JSON."""
    suffix = _get_suffix(path)
    if suffix == ".parquet":
        return InputFormat.PARQUET
    if suffix == ".arrow":
        return InputFormat.ARROW
    if suffix in _TEXTS or suffix in _NAMED_TEXTS:
        return InputFormat.TEXT
    return InputFormat.JSON


def has_record_suffix(path: str) -> bool:
    """Return whether a file has records with keys, which its suffix shows."""
    return _get_suffix(path) in (*_TABLES, *_JSON)


def is_compressed(path: str) -> bool:
    """Return whether the suffix says that a file is compressed."""
    return path.lower().endswith(_COMPRESSED)


def expand_inputs(patterns: Sequence[str], log: Callable[[str], None]) -> list[str]:
    """Return the files that --input names. The files of a glob or a folder are sorted by name.

    Args:
        patterns: Files, globs, folders, and folders of Hugging Face `save_to_disk`.
        log: Receives a line for each folder, which describes the files that are used.

    Raises:
        ConfigError: a pattern matches no file, or a folder has none that can be read.
        DataError: a `save_to_disk` folder is damaged.
    """
    files: list[str] = []
    for pattern in patterns:
        # An existing file is used even if its name contains characters of a glob.
        if Path(pattern).exists():
            found = [pattern]
        else:
            found = sorted(glob.glob(pattern, recursive=True))
            # Such a glob also matches the files in these folders, which would be used twice.
            if "**" in pattern:
                found = [path for path in found if not Path(path).is_dir()]
        if not found:
            if glob.has_magic(pattern):
                what = "matches no file"
            elif is_url(pattern):
                what = "is a URL. Only tools/preprocess_data.py with --engine reads URLs"
            else:
                what = "does not exist"
            raise ConfigError(f"--input {redact(pattern)} {what}.")
        for path in found:
            if Path(path).is_dir():
                files += _list_folder(path, log)
            else:
                files.append(path)
    if not files:
        raise ConfigError("--input needs at least one file.")
    _refuse_special_files(files)
    return files


def leave_out_output(
    paths: Sequence[str], beginnings: tuple[str, ...], log: Callable[[str], None]
) -> list[str]:
    """Return the input files without those that an earlier run with the same output wrote.

    Args:
        paths: The input files.
        beginnings: How the absolute paths of the output begin. A path of an input is compared with
            a slash at its end.
        log: Receives a line about what is left out, and one for each file that is repeated.

    Raises:
        ConfigError: No file is left.
    """
    beginnings = tuple(
        os.path.join(os.path.realpath(os.path.dirname(each) or "."), os.path.basename(each))
        for each in beginnings
    )
    used = [path for path in paths if not f"{os.path.realpath(path)}/".startswith(beginnings)]
    own = sorted(set(paths) - set(used))
    if own:
        log(
            f"{format_count(len(own), 'file')} of --input left out, since this --output-prefix "
            f"writes them, such as {own[0]}"
        )
    if not used:
        raise ConfigError(
            "--input has no file except those that --output-prefix writes. Give another one."
        )
    for path in sorted(path for path, count in Counter(used).items() if count > 1):
        # Not an error, since a repetition may be intended.
        log(f"warning: {redact(path)} is given more than once, so its documents are repeated")
    return used


def _refuse_special_files(files: Sequence[str]) -> None:
    """Raise if a file is a pipe or a device. Reading one may wait permanently.

    Raises:
        ConfigError: One is.
    """
    for path in files:
        if not Path(path).is_file():
            raise ConfigError(
                f"--input {path} is not a regular file but a pipe, a device or a broken link. "
                "Write the texts to a file first."
            )


def _get_suffix(path: str) -> str:
    """Return the suffix of a path in lower case, without that of a compression."""
    name = Path(path.lower())
    if name.suffix in _COMPRESSED:
        name = name.with_suffix("")
    return name.suffix


def _list_folder(folder: str, log: Callable[[str], None]) -> list[str]:
    """Return the files of a folder that can be read, subfolders included."""
    if Path(folder, _DATASET_DICT).is_file():
        splits = _read_object(Path(folder, _DATASET_DICT)).get("splits", [])
        named = ", ".join(str(Path(folder, str(split))) for split in splits) or "none"
        raise ConfigError(
            f"--input {folder} holds several splits of a data set; name the splits to use: {named}."
        )
    if Path(folder, _STATE).is_file():
        return _list_saved_dataset(folder)
    # Without a state.json, the Arrow files of a folder may be caches that `datasets` has left. So
    # an Arrow file is read only if --input names it.
    used = list[str]()
    others = list[str]()
    links = list[str]()
    for parent, subfolders, names in os.walk(folder, onerror=_fail_for_folder):
        # `os.walk` does not enter what is removed from its list.
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        # It does not enter links either, which may lead in a circle.
        links += [
            link
            for link in (str(Path(parent, name)) for name in subfolders)
            if os.path.islink(link)
        ]
        for name in names:
            if name.startswith("."):
                continue
            path = str(Path(parent, name))
            if _get_suffix(path) in (".parquet", *_JSON, *_TEXTS):
                used.append(path)
            else:
                others.append(path)
    known = " ".join((".parquet", *_JSON, *_TEXTS))
    if not used:
        raise ConfigError(
            f"--input {folder} has no file that can be read; known suffixes are {known}, also with "
            ".gz or .zst. If files with another suffix have a JSON record in each line, name the "
            f"files, as in '{folder}/*'."
        )
    kinds = ", ".join(
        f"{count} {suffix}" for suffix, count in sorted(Counter(map(_get_suffix, used)).items())
    )
    log(f"input {folder}: {format_count(len(used), 'file')} ({kinds})")
    if links:
        log(
            f"warning: input {folder}: {format_count(len(links), 'link')} to a folder left out, "
            f"such as {min(links)}; name such folders with --input"
        )
    if others:
        log(
            f"input {folder}: {format_count(len(others), 'other file')} left out, such as "
            f"{min(others)}; the suffix is not known"
        )
    return sorted(used)


def _fail_for_folder(error: OSError) -> NoReturn:
    """Raise the error for a subfolder, whose texts would otherwise be missing silently."""
    raise DataError(
        f"--input: a folder cannot be read: {error}. Fix its permissions, or name the files to use."
    ) from error


def _list_saved_dataset(folder: str) -> list[str]:
    """Return the Arrow files of a folder that Hugging Face's `save_to_disk` wrote, in order."""
    state = _read_object(Path(folder, _STATE))
    # Releases before 2.0 stored a selection of rows as indices, which this reader would ignore.
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(
            f"{folder} is a selection of rows of a larger data set. Write it with a newer release "
            "of datasets, or call flatten_indices() before save_to_disk()."
        )
    try:
        paths = [str(Path(folder, str(file["filename"]))) for file in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{Path(folder, _STATE)} names no data files. Save the data set again."
        ) from error
    for path in paths:
        # A path that leads out of the folder could read a file that the user did not name.
        if Path(path).parent != Path(folder) or not Path(path).is_file():
            raise DataError(
                f"{path}, which {Path(folder, _STATE)} names, is not in the folder. Copy the "
                "complete folder again."
            )
    return paths


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        found = load_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} must be a JSON object, and is {type(found).__name__}.")
    return found
