"""A random CLIP of other sizes than the bundled one."""

from __future__ import annotations

from pathlib import Path

import torch

ANIMALS = ("cat", "very large black bird", "dog", "catfish")


def save_random_clip(path: Path) -> None:
    """RGB, two different widths, one token a letter.

    As in OpenAI's files, its configuration says eos_token_id=2, which is not the tokenizer's: plain
    CLIP then takes the highest id of a text for its end.
    """
    import tokenizers
    import transformers

    letters = [chr(code) for code in range(32, 127)]
    vocabulary = {mark: i for i, mark in enumerate([*letters, "<unk>", "<s>", "</s>"])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    shared = {"intermediate_size": 40, "num_hidden_layers": 2, "hidden_act": "gelu"}
    text = {"hidden_size": 24, "num_attention_heads": 3, "max_position_embeddings": 64}
    ids = {"vocab_size": len(vocabulary), "bos_token_id": 0, "eos_token_id": 2}
    image = {"hidden_size": 32, "num_attention_heads": 2, "image_size": 12, "patch_size": 4}
    config = transformers.CLIPConfig(
        text_config={**shared, **text, **ids},
        vision_config={**shared, **image, "num_channels": 3},
        projection_dim=20,
        initializer_factor=3.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        transformers.CLIPModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
