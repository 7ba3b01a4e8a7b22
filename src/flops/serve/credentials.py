"""API keys and addresses from the user: checked at startup, never displayed."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from flops.errors import FlopsError


def read_key(variable: str | None, file: Path | None) -> str | None:
    """The API key from the environment or a file; None if neither is given.

    Args:
        variable: Name of an environment variable (``--api-key-env``).
        file: A file that holds nothing else (``--api-key-file``).

    Raises:
        FlopsError: The key is missing or invalid. The message does not show it.
    """
    if variable is not None and file is not None:
        raise FlopsError("--api-key-env and --api-key-file exclude each other: pass one of them")
    if variable is not None:
        where = f"the environment variable {variable}"
        text = os.environ.get(variable, "")
        if not text.strip():
            raise FlopsError(f"{where} is not set or empty; --api-key-env names it")
    elif file is not None:
        where = f"the file {file}"
        try:
            text = file.read_bytes()[:65536].decode("utf-8", "replace")
        except OSError as error:
            raise FlopsError(f"--api-key-file cannot be read: {error}") from error
    else:
        return None
    return checked_key(text, where)


def checked_key(text: str, where: str = "the API key") -> str:
    """The key without surrounding whitespace.

    Raises:
        FlopsError: It cannot be sent in a header. The message does not show it.
    """
    key = text.strip()
    if not key or len(key) > 4096 or not (key.isascii() and key.isprintable()):
        raise FlopsError(
            f"{where} holds no valid key: 1 to 4096 printable ASCII characters on one line are "
            "allowed (the value is not shown here)"
        )
    return key


def checked_url(url: str) -> str:
    """The address of a service without a trailing slash.

    Raises:
        FlopsError: It is invalid, or contains a password, which is not shown.
    """
    try:
        parts = urlsplit(url.strip())
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise FlopsError("--url is not an address such as http://127.0.0.1:8000") from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise FlopsError(
            f"--url must be an address only, such as {parts.scheme or 'http'}://"
            f"{parts.netloc.rpartition('@')[2]}: a password in it is visible to others in the list "
            "of processes; pass a key with --api-key-env or --api-key-file"
        )
    if parts.scheme not in ("http", "https") or not host:
        raise FlopsError(f"--url must begin with http:// or https:// and name a host, got {url!r}")
    return url.strip().rstrip("/")
