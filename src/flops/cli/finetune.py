"""`flops finetune`: train a model with forward passes, into a run directory.

The task (`--task`, of the configuration file, or of the run to resume) decides which settings there
are, before the command line is parsed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tyro

from flops.cli.training import RunOptions, chosen_task, given_settings
from flops.tasks.classification.config import PRESETS, FinetuneConfig, FinetunePreset
from flops.tasks.text import TextConfig
from flops.tasks.text.config import PRESETS as TEXT_PRESETS
from flops.tasks.text.config import TextPreset
from flops.training.config import ConfigError, RunConfig


@dataclass(frozen=True)
class Finetune(RunOptions):
    """Fine-tune an image classifier, or a language model (--task text), with forward passes only.

    Without options: the bundled vision transformer on handwritten digits with shaped-lr, in a few
    minutes and without a download. The run directory holds settings, metrics, checkpoints, plots
    and the trained model. A run that was interrupted in any way continues with the resume option.
    With --task text other options apply: see flops finetune --task text --help.

    For example:

    $ flops finetune
    $ flops finetune --method ops-lr --epochs 4 --output runs/ops
    $ flops finetune --resume runs/ops
    $ flops finetune --data photos --model google/vit-base-patch16-224-in21k --preset vit-base
    $ flops finetune --epochs None --budget 200000  # stop by cost
    $ flops finetune --print-config > run.json  # all settings, for editing
    $ flops finetune --config run.json --seed 1
    $ flops finetune --task text  # a language model on labelled texts
    $ torchrun --nproc-per-node 2 -m flops finetune  # two processes, each with half of the batch
    """

    preset: FinetunePreset | None = None
    """Preset of settings: those of the paper for ViT-base and ViT-large, or tiny. The configuration
    file and other options override it."""
    settings: tyro.conf.OmitArgPrefixes[FinetuneConfig] = field(default_factory=FinetuneConfig)

    def run(self) -> None:
        """Train, and print the folder of the results."""
        self.train(self.settings, self.preset, "finetune")


@dataclass(frozen=True)
class FinetuneText(RunOptions):
    """Fine-tune a language model on texts with forward passes only.

    Without other options: the bundled tiny Llama learns to tell captions of garments from others,
    in less than a minute and without a download. Texts are classified by label words after a prompt
    (the default), or by a new head; with rows of prompt and completion, the model learns to
    complete. The run directory holds settings, metrics, checkpoints, plots, and the trained model
    or PEFT adapter with its tokenizer. Without --task text: image classification, see flops
    finetune --help.

    For example:

    $ flops finetune --task text
    $ flops finetune --task text --data reviews.jsonl --model path/to/model --train-last 8
    $ flops finetune --task text --data stars.jsonl --model smollm2 --words "1= bad" "5= great"
    $ flops finetune --task text --data pairs.jsonl --model smollm2 --lora 8  # with completions
    $ flops finetune --task text --data owner/name --columns text=sentence --objective head
    $ flops finetune --task text --preset smollm2  # after make real-models
    $ flops finetune --resume runs/garments-shaped-lr-seed0
    """

    preset: TextPreset | None = None
    """Preset of settings: tiny, or SmolLM2-135M on the sentences. The configuration file and other
    options override it."""
    settings: tyro.conf.OmitArgPrefixes[TextConfig] = field(default_factory=TextConfig)

    def run(self) -> None:
        """Train, and print the folder of the results."""
        self.train(self.settings, self.preset, "finetune")


Command = Finetune | FinetuneText
COMMANDS: Mapping[str, type[Command]] = {"image": Finetune, "text": FinetuneText}
CONFIGS: Mapping[str, type[RunConfig]] = {"image": FinetuneConfig, "text": TextConfig}


def command(arguments: Sequence[str]) -> tuple[type[Command], Command]:
    """The command's type for tyro, by task, with defaults from its preset and file.

    Raises:
        ConfigError: If the file, the preset or the run to resume is invalid, or an option is of the
            other task.
    """
    task = chosen_task(arguments, tuple(COMMANDS))
    own, other = CONFIGS[task], next(name for name in CONFIGS if name != task)
    for option in (argument.partition("=")[0] for argument in arguments):
        if not option.startswith("--"):
            continue
        name = option.removeprefix("--").replace("-", "_")
        if name in CONFIGS[other].model_fields and name not in own.model_fields:
            raise ConfigError(f"{option} needs --task {other}")
    default: Command
    if task == "text":
        default = FinetuneText(settings=given_settings(arguments, TextConfig(), TEXT_PRESETS))
    else:
        default = Finetune(settings=given_settings(arguments, FinetuneConfig(), PRESETS))
    return type(default), default
