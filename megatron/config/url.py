"""URLs in the configuration, and how messages show them.

Invariant: what `redact` returns has no user, password or query of a URL. Any of them may be a
secret. The time of both functions grows linearly with the text, which a hostile server may send.
"""

import re

_WORD = re.compile(r"[^\s'\"]+")
# A password may have slashes, as secret keys of S3 do. A port is no password, and S3 has no port.
_USER = re.compile(r"(\w://)(?:[^/]*|[^/:@]+:(?!\d+/).*|(?<=s3://)[^/:@]+:.*)@")


def is_url(path: str) -> bool:
    """Return whether a path is a URL, as in s3://bucket/folder."""
    return "://" in path


def has_secret(url: str) -> bool:
    """Return whether a URL has a user, a password or a query."""
    return redact(url) != url


def find_address_mistake(path: str) -> str | None:
    """Return what is wrong with an address of checkpoints. None for a right one and for a folder.

    The text begins with the address, without secrets.
    """
    shown = redact_address(path)
    if re.match(r"s3:/?(?!/)", path):
        return f"{shown} must be s3://bucket/run, with two slashes"
    if not is_url(path):
        return None
    scheme, _, rest = path.partition("://")
    if "@" in rest or "?" in rest:
        return (
            f"{shown} must have no user, password or query. Credentials come from the environment, "
            "~/.aws or the role of the machine"
        )
    if scheme != "s3":
        return (
            f"{shown} is not on a store with the interface of S3: conditional writes of other "
            "stores are different, and are not supported. Give an address s3://bucket/run, or a "
            "folder"
        )
    if not rest or any(part in ("", ".", "..") for part in rest.rstrip("/").split("/")):
        return f"{shown} must be s3://bucket/run, with the name of a bucket"
    bucket = rest.partition("/")[0]
    # The rule of the client. A name that it refuses is no matter of the network.
    if re.fullmatch(r"[A-Za-z0-9._-]{1,255}", bucket) is None:
        allowed = "letters, digits, '.', '_' and '-'"
        return f"{shown} has {bucket!r} as bucket, whose name may have {allowed}"
    return None


def redact(text: str) -> str:
    """Return a text in which the users, passwords and queries of all URLs are replaced."""
    return _WORD.sub(lambda word: _redact_word(word[0]), text)


def redact_address(text: str) -> str:
    """As `redact`, for addresses and endpoints of stores, and what the client says about them.

    Nothing before an `@` or after a `?` is shown, also without a scheme. In the path of a data set,
    these may be part of a name.
    """

    def hide(word: re.Match[str]) -> str:
        secret, at, shown = word[0].rpartition("@")
        if at:
            scheme = re.match(r"\w+:/+", secret)
            shown = f"{scheme[0] if scheme else ''}***@{shown}"
        before, mark, query = shown.partition("?")
        return f"{before}{mark}***" if query else shown

    # The client encodes an @ that it takes for part of a path.
    return _WORD.sub(hide, text.replace("%40", "@"))


def _redact_word(word: str) -> str:
    """Redact a text without spaces and quotes."""
    # A search behind the last @ would read all of the rest at each URL there.
    end = word.rfind("@") + 1
    word = _USER.sub(r"\1***@", word[:end]) + word[end:]
    url = re.search(r"\w://", word)
    query = word.find("?", url.end()) + 1 if url else 0
    return f"{word[:query]}***" if 0 < query < len(word) else word
