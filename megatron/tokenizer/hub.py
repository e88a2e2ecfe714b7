"""Folders of tokenizers, on this machine or from the Hugging Face Hub.

Invariant: only the files in `_SMALL_FILES` and `_VOCABULARY_FILES` are fetched. They are data, and
no code of a repository is run. The vocabulary is fetched last, so a folder in the cache that has
one is complete.
"""

import errno
import functools
import re
from pathlib import Path
from typing import Any

from megatron.base.errors import ConfigError
from megatron.base.outside_file import INDEX_BYTES

_SMALL_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*.jinja",
)
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""A name, or organization/name. A path may look the same, so folders are looked for first."""


def find_tokenizer_folder(name_or_path: str | None) -> Path | None:
    """Return the folder that --tokenizer-name-or-path names, or None if it is not on this machine.

    If the flag names a file, this is the file's folder. If it is a name on the Hub, this is the
    folder in the cache of `huggingface_hub`. Nothing is downloaded.
    """
    if name_or_path is None:
        return None
    path = Path(name_or_path)
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    return _find_in_cache(name_or_path) if is_hub_name(name_or_path) else None


def find_tokenizer_file(name_or_path: str | None, file: str) -> Path | None:
    """Return the file that --tokenizer-name-or-path names itself, or `file` in its folder.

    None if it is not on this machine.
    """
    if name_or_path is not None and Path(name_or_path).is_file():
        return Path(name_or_path)
    folder = find_tokenizer_folder(name_or_path)
    return folder / file if folder is not None and (folder / file).is_file() else None


def is_hub_name(name_or_path: str) -> bool:
    """Return whether this can be a name on the Hub."""
    return _HUB_NAME.fullmatch(name_or_path) is not None


def fetch_tokenizer(name: str) -> Path:
    """Return the folder of a tokenizer, which is downloaded if it is not on this machine.

    Args:
        name: A folder, or a name on the Hub.

    Raises:
        ConfigError: It is neither, or the Hub cannot be reached.
    """
    if (found := find_tokenizer_folder(name)) is not None:
        return found
    # A name on the Hub cannot be told from a path, except if it is that of a file.
    if not is_hub_name(name) or name.endswith((".model", ".json")):
        raise ConfigError(f"--tokenizer-name-or-path {name} does not exist. Correct the path.")
    # The package is slow to import, and most runs do not need it.
    from huggingface_hub import constants, errors, snapshot_download, utils

    class BoundedBar(utils.tqdm):
        """A bar of the bytes that arrive, which ends a download that is too long."""

        arrived = 0.0

        def update(self, n: float | None = 1) -> Any:
            self.arrived += n or 0
            if self.arrived > INDEX_BYTES:
                raise OSError(errno.EFBIG, f"the Hub sends more than {INDEX_BYTES:,} bytes")
            return super().update(n)

    fetch = functools.partial(snapshot_download, name, tqdm_class=BoundedBar)
    try:
        folder = fetch(allow_patterns=list(_SMALL_FILES))
        # The last part of the path is the commit. The repository may change in between.
        fetch(revision=Path(folder).name, allow_patterns=list(_VOCABULARY_FILES))
    # The texts of these errors are not shown, because they may have signed addresses.
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"--tokenizer-name-or-path {name}: its files need a permission. Accept the terms at "
            f"{constants.ENDPOINT}/{name}, and set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"--tokenizer-name-or-path {name} is neither a folder on this machine nor a repository "
            "of the Hub that you may read. Correct it, or set HF_TOKEN if it is private."
        ) from error
    # No connection, no space on the disk, HF_HUB_OFFLINE, an answer that is not the Hub's.
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = error if getattr(error, "errno", 0) == errno.EFBIG else type(error).__name__
        if status in (401, 403):
            raise ConfigError(
                f"--tokenizer-name-or-path {name}: the Hub refuses the token (HTTP {status}). "
                "Correct HF_TOKEN, or log in with hf auth login."
            ) from None
        raise ConfigError(
            f"--tokenizer-name-or-path {name} is not a folder on this machine, and cannot be "
            f"downloaded from the Hub ({reason}). Correct it, or download it where "
            f"the Hub can be reached, with hf download {name} {' '.join(_VOCABULARY_FILES)} "
            f"{' '.join(_SMALL_FILES[:3])} --local-dir FOLDER, and give this folder."
        ) from None
    found = find_tokenizer_folder(name)
    if found is None:
        raise ConfigError(
            f"--tokenizer-name-or-path {name}: this repository of the Hub has none of "
            f"{', '.join(_VOCABULARY_FILES)}. Give a folder with a tokenizer.json. A file of "
            "tiktoken (tekken.json, *.tiktoken) must be converted first (docs/tokenizers.md)."
        )
    return found


def _find_in_cache(name: str) -> Path | None:
    """Return the folder of a repository in the cache, or None unless it has a vocabulary."""
    # The package is slow to import, and most runs do not need it.
    from huggingface_hub import snapshot_download

    patterns = [*_SMALL_FILES, *_VOCABULARY_FILES]
    try:
        # With the patterns, newer versions of the package refuse a folder that is incomplete.
        folder = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    # The package raises several classes for what it does not find.
    except Exception:
        return None
    if any((folder / file).is_file() for file in _VOCABULARY_FILES):
        return folder
    return None
