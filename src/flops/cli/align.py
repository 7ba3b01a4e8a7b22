"""`flops align`: an adapter between two frozen models, trained with forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from flops.perturb.random import Kind
from flops.tasks.data.captions import INSTRUCTION, shown_how
from flops.training.commands import given_settings, print_settings, resumed, run_training
from flops.training.config import ConfigError, RunConfig
from flops.training.methods import Method

if TYPE_CHECKING:
    import torch

    from flops.training.task import Task

AlignMethod = Literal["bp", "lr", "ops-lr", "ops-spsa", "shaped-lr"]
AlignPreset = Literal["tiny", "smollm2", "paper"]
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "smollm2": {
        "language": "smollm2",
        "instruction": shown_how(),
        "ending": "\n",
        "batch": 8,
        "chunk": 16,
        "limit": 120,
        "epochs": 1,
        "learning_rate": 5e-3,
    },
    "paper": {
        "encoder": "openai/clip-vit-large-patch14",
        "language": "lmsys/vicuna-7b-v1.5",
        "data": "blip_laion_cc_sbu_558k.json",
        "instruction": "Describe the image concisely.",
        "method": "ops-lr",
        "batch": 64,
        "queries": 60,
        "learning_rate": 5e-4,
        "epochs": 1,
        "chunk": 16,
    },
}


@dataclass(frozen=True)
class AlignConfig(RunConfig):
    """Everything that decides what an alignment does; plain values.

    Raises:
        ConfigError: If a value is not allowed.
    """

    method: AlignMethod = "shaped-lr"
    """How gradients are estimated; bp is backpropagation, for comparison."""
    queries: float = 60.0
    """Mean queries per point."""
    sigma: tuple[float, ...] | None = (1e-3,)
    """Noise scale."""
    epochs: int | None = 12
    """Epochs; None for no limit but the budget."""
    learning_rate: float = 1e-3
    """Of the optimizer."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """Whether the learning rate stays, or falls to 0 as a cosine over the run."""
    data: str = "fashion"
    """The embedded images, a LLaVA-format .json file, a folder of images with captions, or classes
    of images as `flops finetune` takes them."""
    limit: int | None = None
    """Most images of each split, for a quick look; None for all."""
    encoder: str = "bundled"
    """The bundled tiny ViT, a vision model id of the hub, or a folder."""
    language: str = "bundled"
    """The bundled tiny Llama, smollm2, a GGUF file, a causal model id of the hub, or a folder."""
    pictures: str | None = None
    """Folder of the images that a .json file names; None is its own."""
    instruction: str = INSTRUCTION
    """Text before the visual tokens; may be empty."""
    ending: str = ""
    """Text that ends a caption; empty for the language model's own mark."""
    visual_tokens: int = 1
    """Visual tokens of an image."""
    noise: Kind = "gaussian"
    """Directions of likelihood ratio: orthogonal ones of a point tell more than independent."""
    shuffled: bool = False
    """A control: training images get the captions of others, so that nothing can be seen."""
    samples: int = 8
    """Validation images of which the report says what is said of them."""
    strict: bool = False
    """Stop at a missing or broken image, instead of leaving it out with a warning."""

    def __post_init__(self) -> None:
        """Check the values."""
        self._need(self.visual_tokens > 0, "visual_tokens", "greater than 0")
        self._need(self.samples >= 0, "samples", "0 or more")
        super().__post_init__()

    def recipe(self) -> Method:
        """The method with its settings: the adapter is a single stage."""
        return Method(self.method, self.queries, self.sigma, stages=1, noise=self.noise)

    def open(self, device: torch.device) -> Task:
        """Load the two models and the pairs."""
        from flops.tasks.alignment.task import Alignment

        return Alignment(self, device)


def preset(name: str) -> dict[str, Any]:
    """The settings of a preset.

    Raises:
        ConfigError: If there is none of this name.
    """
    if name not in tuple(PRESETS):  # of a file it may be anything, a list too
        raise ConfigError(f"preset must be one of {', '.join(PRESETS)}, not '{name}'")
    return PRESETS[name]


@dataclass(frozen=True)
class Align:
    """Align a frozen image encoder with a frozen language model, with forward passes only.

    A linear adapter turns what the encoder sees into a token that the language model reads before
    it says the caption. Without options: the bundled encoder and the bundled tiny Llama on the
    embedded images, in minutes and without a download. Run folder and resuming are those of
    `flops finetune`; report.md has what the model says of some images before and after.

    For example:

    $ flops align
    $ flops align --method ops-lr --output runs/aligned
    $ flops align --resume runs/aligned
    $ flops align --shuffled  # a control: nothing can be learned about the images
    $ flops align --preset smollm2  # after make real-models; 18 seconds a step on two cores
    $ flops align --preset paper --data chat.json --pictures images
    """

    preset: AlignPreset | None = None
    """Settings that go together: tiny, SmolLM2-135M, or the paper's. What the configuration file or
    another option says counts more."""
    config: Path | None = None
    """File with settings, .json or .toml; names are those of the options, with _ for -."""
    resume: Path | None = None
    """Continue the run in this folder; its settings stay what they are. With the same machine,
    library versions and number of threads it ends with the same bits as an unbroken run, else it
    says what changed, and differs by rounding."""
    checkpoint: Literal["last", "previous"] = "last"
    """Where to continue: the last that is whole, or the one before."""
    print_config: bool = False
    """Print all settings as JSON and stop."""
    settings: tyro.conf.OmitArgPrefixes[AlignConfig] = field(default_factory=AlignConfig)

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Align:
        """What holds unless the command line says otherwise; errors as `given_settings`."""
        return cls(settings=given_settings(arguments, AlignConfig(), preset))

    def run(self) -> None:
        """Train, and say where the results are."""
        if self.print_config:
            print_settings(self.settings)
            return
        settings = self.settings
        if self.resume is not None:
            settings = resumed(settings, self.resume, AlignConfig(), (self.config, self.preset))
        run_training(settings, "align", self.resume is not None, self.checkpoint)


def subcommand(arguments: Sequence[str]) -> Any:
    """The command's type for tyro, with the defaults that these arguments ask for."""
    wanted = len(arguments) > 0 and arguments[0] == "align"
    default = Align.defaults(arguments[1:]) if wanted else Align()
    return tyro.conf.subcommand("align", default=default)
