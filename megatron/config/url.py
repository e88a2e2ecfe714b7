"""URLs in the configuration, and how messages show them.

Invariant: what `redact` returns has no user, password or query of a URL. Any of them may be a
secret.
"""

import re


def is_url(path: str) -> bool:
    """Return whether a path is a URL, as in s3://bucket/folder."""
    return "://" in path


def is_address_without_slash(path: str) -> bool:
    """Return whether a path is an address that lacks a slash, as s3:/bucket/run."""
    return re.match(r"s3:/?(?!/)", path) is not None


def has_secret(url: str) -> bool:
    """Return whether a URL has a user, a password or a query."""
    return redact(url) != url


def find_address_mistake(address: str) -> str | None:
    """Return what is wrong with an address of checkpoints, or None. It has no secret."""
    scheme, _, rest = address.partition("://")
    if has_secret(address) or "@" in rest or "?" in rest:
        return (
            "must have no user, password or query. Credentials come from the environment, ~/.aws "
            "or the role of the machine"
        )
    if scheme != "s3":
        return (
            "is not on a store with the interface of S3: conditional writes of other stores are "
            "different, and are not supported. Give an address s3://bucket/run, or a folder"
        )
    if not rest or any(part in ("", ".", "..") for part in rest.rstrip("/").split("/")):
        return "must be s3://bucket/run, with the name of a bucket"
    bucket = rest.partition("/")[0]
    # The rule of the client. A name that it refuses is no matter of the network.
    if re.fullmatch(r"[A-Za-z0-9._-]{1,255}", bucket) is None:
        return f"has {bucket!r} as bucket, whose name may have letters, digits, '.', '_' and '-'"
    return None


def redact(text: str) -> str:
    """Return a text in which the users, passwords and queries of all URLs are replaced."""
    # A password may have slashes, as secret keys of S3 do. A port is no password.
    password = r"[^\s/'\":@]+:(?!\d+/)[^\s'\"]{0,300}"
    text = re.sub(rf"(\w://)(?:[^\s/'\"]*|{password})@", r"\1***@", text)
    return re.sub(r"(\w://[^\s?'\"]*)\?[^\s'\"]+", r"\1?***", text)
