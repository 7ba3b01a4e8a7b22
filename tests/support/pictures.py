"""Images of one shade each, in folders, and what a split makes of them."""

from __future__ import annotations

import io

import torch
from PIL import Image

from flops.tasks.data.images import ImageFormat

GREY = ImageFormat(8, 1, (0.0,), (1.0,))
RGB = ImageFormat(8, 3, (0.5, 0.4, 0.3), (0.5, 0.25, 0.2))


def picture(value, size=(8, 8), mode="L"):
    return Image.new(mode, size, value if mode == "L" else (value,) * len(mode))


def make_folder(root, counts, *, start=0, size=(8, 8), mode="L"):
    """Images of one shade each: start, start + 1, ... in the order of classes and names."""
    shade = start
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            picture(shade, size, mode).save(root / name / f"{i:03}.png")
            shade += 1
    return root


def shades(split, format=GREY):
    """Return what make_folder wrote: the value of each image, in the order of the rows."""
    pixels, labels = split.batch(torch.arange(len(split)))
    assert pixels.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert torch.equal(labels, split.labels)
    assert pixels.shape == (len(split), format.channels, format.size, format.size)
    values = format.restore(pixels).mul(255).round().long().flatten(1)
    assert (values == values[:, :1]).all()
    return values[:, 0].tolist()


def raw(value, **options):
    buffer = io.BytesIO()
    picture(value, **options).save(buffer, "PNG")
    return buffer.getvalue()
