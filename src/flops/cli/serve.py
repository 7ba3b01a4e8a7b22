"""`flops serve`: the options."""

from __future__ import annotations

import ipaddress
import json
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flops.errors import FlopsError


@dataclass(frozen=True)
class Serve:
    """Serve a frozen CLIP over HTTP: logits for prompts, never weights or gradients.

    Clients upload points once and ask for logits of (point, text prompt, image prompt) rows;
    `/docs` describes the requests. Every answer is in the ledger before it is sent, so a request
    that is repeated under its key, also after a crash, is free and gets the same answer. Answers do
    not depend on what they are batched with.

    For example:

    $ flops serve
    $ flops serve --port 0 --json
    $ flops serve --model openai/clip-vit-base-patch32 --classes cat,dog --ledger cats.sqlite
    $ KEY=secret flops serve --host 0.0.0.0 --api-key-env KEY --rate 50
    """

    model: str = "tiny-clip"
    """The bundled tiny CLIP, a model id of the hub, or a folder."""
    classes: str | None = None
    """Class names with commas between them, or a file with one on each line; None for those of the
    bundled model."""
    template: str = "a photo of a {}."
    """Class text with {} for the name."""
    host: str = "127.0.0.1"
    """Address to listen on; others than this machine's own reach it only if this says so."""
    port: int = 8000
    """Port; 0 for a free one."""
    api_key_env: str | None = None
    """Environment variable with the key that clients have to show."""
    api_key_file: Path | None = None
    """File with that key, instead."""
    ledger: Path | None = None
    """File of answers and points; None for one of this model in the state folder."""
    rate: float = 1000.0
    """Most requests per second; 0 for no limit."""
    max_rows: int = 1024
    """Most rows of a request."""
    max_body: int = 32
    """Most megabytes of a request; uploads of points may have 8 times as many, JSON 1."""
    max_queue: int = 1024
    """Most requests that wait; who comes then is told to come back."""
    max_stored: int = 1024
    """Most megabytes of all points together."""
    max_ledger: int = 16384
    """Most megabytes of the ledger. When it is full, new requests are refused (507) and repeats are
    still answered: nothing that was paid for is ever thrown away."""
    max_tokens: int = 16
    """Most prompt tokens, as far as the model allows."""
    text_batch: int = 8
    """Text prompts per batch; every batch is padded to this size."""
    image_batch: int = 32
    """Images per batch; likewise."""
    timeout: float = 60.0
    """Seconds for a request to arrive, of which its head may take 10."""
    window: float = 2.0
    """Milliseconds that a request waits for company if it does not fill a batch."""
    threads: int | None = None
    """Threads of torch; None for its own choice."""
    json: bool = False
    """Print the address as JSON when ready."""
    with_parent: bool = False
    """End when standard input does: a process that starts the service and holds the other end of a
    pipe then takes it along, however it ends."""

    def run(self) -> None:
        """Serve until stopped."""
        self._check()
        if self.with_parent:
            threading.Thread(target=_end_with_input, daemon=True).start()
        from flops.serve.credentials import read_key

        key = read_key(self.api_key_env, self.api_key_file)
        setup = self._setup(key)
        if not _loopback(self.host) and key is None:
            sys.stderr.write(
                f"flops: WARNING: listening on {self.host} WITHOUT A KEY: whoever reaches this "
                f"machine can use the model. Set one with --api-key-env or --api-key-file.\n"
            )
        from flops.serve.server import serve

        def ready(url: str) -> None:
            about = {"url": url, "model": self.model, "digest": setup.weights}
            about |= {"ledger": str(setup.ledger.path), "pid": os.getpid()}
            line = json.dumps(about) if self.json else f"serving {self.model} at {url}"
            print(line, flush=True)

        serve(setup, self.host, self.port, ready)

    def _check(self) -> None:
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

    def _setup(self, key: str | None) -> Any:
        """Load the model, check the batch sizes, open the ledger."""
        from flops.optional import require

        for module in ("transformers", "fastapi", "uvicorn"):
            require(module, "blackbox")
        import torch

        from flops.serve.limits import Limits
        from flops.serve.scorer import Scorer
        from flops.serve.service import Setup
        from flops.serve.store import Ledger
        from flops.tasks.models.clip import PromptedClip

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        try:
            model = PromptedClip.load(self.model, self._classes(), self.template)
        except OSError as error:
            raise FlopsError(f"the model {self.model} cannot be loaded: {error}") from error
        weights = model.digest()
        scorer = Scorer(model, self.text_batch, self.image_batch)
        limits = Limits(
            rows=self.max_rows,
            body=self.max_body * 2**20,
            upload=self.max_body * 2**23,
            stored=self.max_stored * 2**20,
            queue=self.max_queue,
            tokens=self.max_tokens,
            rate=self.rate,
            patience=self.timeout,
            ledger=self.max_ledger * 2**20,
        )
        path = self.ledger or _state_folder() / f"{weights[:16]}.sqlite"
        return Setup(
            name=self.model,
            weights=weights,
            model=model,
            scorer=scorer,
            ledger=Ledger(path, weights, limits.ledger),
            limits=limits,
            window=self.window / 1000,
            threads=self.threads,
            api_key=key,
            open_docs=_loopback(self.host),
        )

    def _classes(self) -> tuple[str, ...] | None:
        if self.classes is None:
            return None
        path = Path(self.classes)
        if "," not in self.classes and path.is_file():
            names = [line.strip() for line in path.read_text("utf-8").splitlines()]
        else:
            names = [name.strip() for name in self.classes.split(",")]
        names = [name for name in names if name]
        if not names:
            raise FlopsError(f"--classes names none: {self.classes!r}; separate them with commas")
        return tuple(names)


def _loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _end_with_input() -> None:
    """Every answer that was sent is in the ledger already: there is nothing to tidy up."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def _state_folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "flops"
