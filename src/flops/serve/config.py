"""Configuration of `flops serve`."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from flops.errors import FlopsError


@dataclass(frozen=True)
class ServeConfig:
    """Model, address and limits of the service."""

    model: str = "tiny-clip"
    """The bundled tiny CLIP, a model id of the hub, or a folder."""
    classes: str | None = None
    """Class names separated by commas, or a file with one per line; None for those of the bundled
    model."""
    template: str = "a photo of a {}."
    """Class text with {} for the name."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU if available."""
    host: str = "127.0.0.1"
    """Address to listen on; by default reachable from this machine only."""
    port: int = 8000
    """Port; 0 for a free one."""
    api_key_env: str | None = None
    """Environment variable with the API key that clients must send."""
    api_key_file: Path | None = None
    """File with the API key."""
    ledger: Path | None = None
    """File of the answer store, with answers and points; None for one per model in the state
    folder."""
    rate: float = 1000.0
    """Largest number of requests per second; 0 for no limit."""
    max_rows: int = 1024
    """Largest number of rows per request."""
    max_body: int = 32
    """Largest size of a request in megabytes; 8 times as much for uploads of points, 1 for JSON."""
    max_queue: int = 1024
    """Largest number of requests in flight; others get 429 with Retry-After."""
    max_stored: int = 1024
    """Largest total size of all points, in megabytes."""
    max_ledger: int = 16384
    """Largest size of the answer store, in megabytes. When it is full, new requests get 507 and
    repeats are still answered: no answer that was charged is ever evicted."""
    max_tokens: int = 16
    """Largest number of prompt tokens, as far as the model allows."""
    text_batch: int = 8
    """Text prompts per batch; every batch is padded to this size."""
    image_batch: int = 32
    """Images per batch; every batch is padded to this size."""
    timeout: float = 60.0
    """Timeout for receiving a request, in seconds, of which 10 for its headers."""
    window: float = 2.0
    """Batching window: milliseconds to wait for other requests when a batch is not full."""
    threads: int | None = None
    """Number of torch threads; None for its default."""
    json: bool = False
    """Print the address as JSON when ready."""
    with_parent: bool = False
    """Exit when standard input closes, so that the service ends with the process that started
    it."""

    def check(self) -> None:
        """Raise for values that are out of range.

        Raises:
            FlopsError: Names the option.
        """
        least = {"max_rows": 1, "max_body": 1, "max_queue": 1, "text_batch": 1, "image_batch": 1}
        least |= {"port": 0, "rate": 0, "window": 0, "max_tokens": 0, "max_ledger": 1}
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                option = "--" + name.replace("_", "-")
                raise FlopsError(f"{option} must be at least {bound}, got {getattr(self, name)}")
        if not self.timeout > 0:
            raise FlopsError(f"--timeout must be positive, got {self.timeout}")
        if self.port > 65535:
            raise FlopsError(f"--port must be at most 65535, got {self.port}")
        if self.threads is not None and self.threads < 1:
            raise FlopsError(f"--threads must be at least 1, got {self.threads}")

    def class_names(self) -> tuple[str, ...] | None:
        """Names in `classes`; None for those of the model.

        Raises:
            FlopsError: There are none, or they cannot be read.
        """
        if self.classes is None:
            return None
        path = Path(self.classes)
        try:
            if "," not in self.classes and path.is_file():
                names = [line.strip() for line in path.read_text("utf-8").splitlines()]
            else:
                self.classes.encode("utf-8")  # what is not UTF-8 in an argument is kept as it is
                names = [name.strip() for name in self.classes.split(",")]
        except (UnicodeDecodeError, UnicodeEncodeError) as error:
            shown = os.fsencode(self.classes).decode("utf-8", "backslashreplace")
            raise FlopsError(
                f"--classes {shown}: the names are not UTF-8 ({error.reason})"
            ) from error
        except OSError as error:
            raise FlopsError(f"--classes {path} cannot be read: {error.strerror}") from error
        names = [name for name in names if name]
        if not names:
            raise FlopsError(f"--classes has no names: {self.classes!r}; separate them with commas")
        return tuple(names)

    @property
    def local(self) -> bool:
        """Whether the address is reachable from this machine only."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def store_path(self, weights: str) -> Path:
        """File of the answer store of a model with this digest."""
        if self.ledger is not None:
            return self.ledger
        base = os.environ.get("XDG_STATE_HOME")
        folder = Path(base) if base else Path.home() / ".local" / "state"
        return folder / "flops" / f"{weights[:16]}.sqlite"
