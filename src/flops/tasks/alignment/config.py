"""Configuration of `flops align`, and its presets."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from flops.perturb.random import Kind
from flops.tasks.data.captions import INSTRUCTION, few_shot_instruction
from flops.training.config import FromList, PositiveFloat, PositiveInt, RunConfig
from flops.training.methods import Method

AlignMethod = Literal["bp", "lr", "ops-lr", "ops-spsa", "shaped-lr"]
Engine = Literal["torch", "llama-cpp"]
AlignPreset = Literal["tiny", "smollm2", "paper"]
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "smollm2": {
        "language": "smollm2",
        "instruction": few_shot_instruction(),
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


class AlignConfig(RunConfig):
    """All options of a run of `flops align`.

    Raises:
        ConfigError: If a name is unknown or a value is not allowed.
    """

    method: AlignMethod = "shaped-lr"
    """Gradient estimator; bp is backpropagation, for comparison."""
    queries: PositiveFloat = 60.0
    """Mean queries per point."""
    sigma: Annotated[tuple[PositiveFloat, ...] | None, FromList] = None
    """Noise scale; None is 1e-3, or with llama.cpp a scale above its rounding, found by itself."""
    epochs: PositiveInt | None = 12
    """Epochs; None for no limit but the budget."""
    learning_rate: PositiveFloat = 1e-3
    """Learning rate of the optimizer."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """Learning rate schedule: constant, or cosine decay to 0 over the run."""
    data: str = "fashion"
    """The embedded images, a LLaVA-format .json file, a folder of images with captions, or classes
    of images as `flops finetune` takes them."""
    limit: PositiveInt | None = None
    """Largest number of images per split, for quick runs; None for all."""
    encoder: str = "bundled"
    """The bundled tiny ViT, a vision model id of the hub, or a folder."""
    language: str = "bundled"
    """The bundled tiny Llama, smollm2, a GGUF file, a causal model id of the hub, or a folder."""
    engine: Engine = "torch"
    """What runs the language model; llama-cpp reads GGUF files and keeps them quantised."""
    pictures: str | None = None
    """Folder of the images that a .json file refers to; None is the folder of the file."""
    instruction: str = INSTRUCTION
    """Text before the visual tokens; may be empty."""
    ending: str = ""
    """Text that ends a caption; empty for the language model's own end-of-sequence token."""
    visual_tokens: PositiveInt = 1
    """Visual tokens per image."""
    noise: Kind = "gaussian"
    """Distribution of the noise of likelihood ratio; orthogonal directions have less variance than
    independent ones."""
    shuffled: bool = False
    """Control: training images get the captions of others, so that images carry no information
    about them."""
    samples: Annotated[int, Field(ge=0)] = 8
    """Number of validation images with generated captions in the report."""
    strict: bool = False
    """Stop at a missing or broken image, instead of skipping it with a warning."""

    def recipe(self) -> Method:
        """The method with these options: the adapter is a single stage."""
        if self.engine == "llama-cpp" and self.method == "bp":
            raise ValueError(
                "llama.cpp has no backward pass: choose a forward method, such as shaped-lr, or "
                "engine torch"
            )
        sigma = (1e-3,) if self.sigma is None and not self.rounded else self.sigma
        return Method(self.method, self.queries, sigma, stages=1, noise=self.noise)

    @property
    def rounded(self) -> bool:
        """Whether sigma must be found above the rounding of the engine."""
        return self.engine == "llama-cpp" and self.sigma is None and self.method != "ops-spsa"
