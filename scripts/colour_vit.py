"""Write the bundled vision transformer as a model of RGB images, to fine-tune on photos.

The weights of its grey channel are distributed over red, green and blue with Pillow's luminance
coefficients, so the output for a photo equals that of the bundled model for its grey copy. Training
can then use colour. Nothing is pretrained again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import ViTForImageClassification
from transformers.utils import logging

from flops.tasks.classification import bundled_vit
from flops.tasks.classification.task import preprocessor
from flops.tasks.data.digits import IMAGE_MEAN, IMAGE_SIZE, IMAGE_STD
from flops.tasks.data.pixels import ImageFormat

GREY = (0.299, 0.587, 0.114)
FORMAT = ImageFormat(IMAGE_SIZE, 3, (IMAGE_MEAN,) * 3, (IMAGE_STD,) * 3)
WEIGHT = "vit.embeddings.patch_embeddings.projection.weight"


def colour_vit() -> ViTForImageClassification:
    """Return the bundled model, its head included, for three channels."""
    bundled = bundled_vit(pretrained_head=True)
    weights = bundled.state_dict()
    weights[WEIGHT] = weights[WEIGHT] * torch.tensor(GREY)[:, None, None]  # (64, 3, 8, 8)
    bundled.config.num_channels = 3
    model = ViTForImageClassification(bundled.config)
    model.load_state_dict(weights)
    return model.eval()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write; must not exist yet")
    folder = parser.parse_args().folder
    if folder.exists():
        parser.error(f"{folder} exists; choose a new folder, or use this one")
    logging.disable_progress_bar()
    colour_vit().save_pretrained(folder)
    text = json.dumps(preprocessor(FORMAT), indent=2) + "\n"
    (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")
    print(f"Written to {folder}; use it with --model {folder}")


if __name__ == "__main__":
    main()
