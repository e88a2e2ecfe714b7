"""URLs in the configuration, and how messages show them.

Invariant: what `redact` returns has no user, password or query of a URL. Any of them may be a
secret.
"""

import re


def is_url(path: str) -> bool:
    """Return whether a path is a URL, as in s3://bucket/folder."""
    return "://" in path


def has_secret(url: str) -> bool:
    """Return whether a URL has a user, a password or a query."""
    return redact(url) != url


def redact(text: str) -> str:
    """Return a text in which the users, passwords and queries of all URLs are replaced."""
    text = re.sub(r"(\w://)[^\s/'\"]*@", r"\1***@", text)
    return re.sub(r"(\w://[^\s?'\"]*)\?[^\s'\"]+", r"\1?***", text)
