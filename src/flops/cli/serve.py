"""`flops serve`: the command."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from flops.errors import FlopsError
from flops.optional import require
from flops.serve.config import ServeConfig
from flops.serve.credentials import read_key


@dataclass(frozen=True)
class Serve(ServeConfig):
    """Serve a frozen CLIP over HTTP: logits for prompts, never weights or gradients.

    Clients upload points once and request logits of (point, text prompt, image prompt) rows;
    `/docs` describes the API. Every answer is in the answer store before it is sent, so a repeat
    under the same idempotency key, even after a crash, is free and gets the same answer. Answers do
    not depend on other requests in the batch.

    For example:

    $ flops serve
    $ flops serve --port 0 --json
    $ flops serve --model openai/clip-vit-base-patch32 --classes cat,dog --ledger cats.sqlite
    $ KEY=secret flops serve --host 0.0.0.0 --api-key-env KEY --rate 50
    """

    def run(self) -> None:
        """Serve until stopped."""
        self.check()
        if self.with_parent:
            threading.Thread(target=_exit_with_input, daemon=True).start()
        key = read_key(self.api_key_env, self.api_key_file)
        needed = ("transformers", "fastapi", "uvicorn", "cachetools", "prometheus_client")
        for module in needed:
            require(module, "blackbox")
        import torch

        from flops.serve.server import serve
        from flops.serve.service import set_up
        from flops.tasks.models.clip import PromptedClip
        from flops.training.device import find_device

        device = find_device(self.device)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        try:
            model = PromptedClip.load(self.model, self.class_names(), self.template)
        except OSError as error:
            raise FlopsError(f"the model {self.model} cannot be loaded: {error}") from error
        setup = set_up(self, model.to(device), key)
        if not self.local and key is None:
            sys.stderr.write(
                f"flops: WARNING: listening on {self.host} WITHOUT A KEY: anyone who can reach "
                f"this machine can use the model. Set one with --api-key-env or --api-key-file.\n"
            )

        def ready(url: str) -> None:
            about: dict[str, str | int] = {"url": url, "model": self.model, "digest": setup.weights}
            about |= {"ledger": str(setup.store.path), "pid": os.getpid()}
            line = json.dumps(about) if self.json else f"serving {self.model} at {url}"
            print(line, flush=True)

        serve(setup, self.host, self.port, ready)


def _exit_with_input() -> None:
    """Exit at once: every answer that was sent is already in the store."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def command(arguments: Sequence[str]) -> tuple[type[Serve], None]:
    """The command's type for tyro."""
    return Serve, None
