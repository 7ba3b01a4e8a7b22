"""Options of prompt tuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from flops.errors import FlopsError, check_least
from flops.serve.credentials import checked_url, read_key
from flops.tasks.tuning.config import CampaignConfig
from flops.tasks.tuning.names import PROMPT_METHODS, TuneMethod

DEFAULT: tuple[TuneMethod, ...] = ("manual", "lr", "ops-lr", "shaped-lr", "cma-es", "bp")


@dataclass(frozen=True)
class TuneConfig(CampaignConfig):
    """Methods, sizes, data and service of prompt tuning."""

    preset: Literal["tiny", "paper"] = "tiny"
    """Sizes: tiny for the bundled model, or those of the paper (10 image and 12 text prompt
    vectors of 500 dimensions each, 60 queries, learning rate 1e-4, 50 epochs). Options given
    explicitly override them."""
    text_tokens: int = 12
    """Text prompt vectors, before the class text."""
    image_tokens: int = 10
    """Image prompt vectors, after the patches."""
    dimensions: int | None = None
    """For an objective, the length of the vector of zeros it starts from, without --start. For
    prompts d_T + d_I: half are parameters of a text prompt vector, half of an image one."""
    single: bool = False
    """One parameter vector per modality, `dimensions` in total, instead of one per prompt
    vector."""
    shots: int = 16
    """Training images per class."""
    data: str = "fashion-shots"
    """The bundled shots, or anything that `flops finetune --data` accepts."""
    model: str = "tiny-clip"
    """Model of the service that is started, and of bp: bundled, a hub id, or a folder."""
    template: str = "a photo of a {}."
    """Class text with {} for the name, for the service that is started."""
    device: str = "auto"
    """Device of the service that is started, and of bp: cpu, cuda, or auto, a GPU if available."""
    url: str | None = None
    """Address of a running service; None starts one."""
    api_key_env: str | None = None
    """Environment variable with the service's API key."""
    api_key_file: Path | None = None
    """File with the service's API key."""
    limit: int | None = None
    """Largest number of test images, for quick runs."""

    def filled(self) -> TuneConfig:
        """Fill in the preset and validate.

        Raises:
            FlopsError: Names the option to change.
        """
        values = {
            "tiny": {"queries": 20.0, "epochs": 20, "dimensions": 64, "sigma": 0.01},
            "paper": {"queries": 60.0, "epochs": 50, "dimensions": 1000, "sigma": 0.01},
        }[self.preset]
        sizes: Sequence[float] = (0.1,) if self.preset == "tiny" else (1e-4,)
        filled = {n: v for n, v in values.items() if getattr(self, n) is None}
        chosen = replace(self, **filled)  # type: ignore[arg-type]
        if chosen.url is not None:
            chosen = replace(chosen, url=checked_url(chosen.url))
        if chosen.step_sizes is None:
            chosen = replace(chosen, step_sizes=tuple(sizes))
        if chosen.timeout is None:
            chosen = replace(chosen, timeout=60.0)
        if chosen.concurrency is None:
            chosen = replace(chosen, concurrency=4)
        if chosen.methods is None:
            some = DEFAULT if chosen.url is None else DEFAULT[:-1]
            chosen = replace(chosen, methods=some)
        chosen.check(PROMPT_METHODS)
        check_least({"shots": 1, "dimensions": 2, "limit": 1}, chosen)
        if chosen.text_tokens + chosen.image_tokens < 1:
            raise FlopsError("need at least one text or image prompt vector to tune")
        return chosen

    def api_key(self) -> str | None:
        """Read the API key from the environment or a file."""
        return read_key(self.api_key_env, self.api_key_file)
