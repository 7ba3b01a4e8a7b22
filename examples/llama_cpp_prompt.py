"""Tune a soft prompt for a 4-bit language model in llama.cpp, with forward passes only.

SmolLM2-135M (`make real-models`) stays quantised in llama.cpp, which has no backward pass. It is
asked whether reviews are positive, by the probabilities of two words. Learned are four vectors
before each review: noise goes on them, through llama.cpp, to the loss.

    python examples/llama_cpp_prompt.py [--seeds 3] [--steps 40]
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import nn

from flops import ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.tasks.models.language import load_gguf

BATCH, QUERIES, RATE, VECTORS = 16, 16, 2e-2, 4
TRAIN, HELD_OUT, LONGEST = 512, 300, 40
START, REVIEW = "A review of a", "{text} It was"
WORDS = (" terrible", " great")


class Prompt(nn.Module):
    """The vectors, for every row: noise goes here."""

    def __init__(self, start):
        super().__init__()
        self.value = nn.Parameter(start.clone())

    def forward(self, tokens):
        return self.value.expand(len(tokens), -1, -1)


class Classifier(nn.Module):
    """Scores of the two words after the prompt and the review."""

    def __init__(self, language):
        super().__init__()
        self.llama = language.model
        start = torch.tensor(language.tokens(START))[:VECTORS]
        self.prompt = Prompt(self.llama.embeddings(start))
        self.words = [language.tokens(word)[0] for word in WORDS]

    def forward(self, tokens, lengths):
        logits = self.llama(self.prompt(tokens), tokens, lengths)
        return logits[:, self.words]


def reviews(language, file, count):
    """Padded tokens, their number and the label of each review."""
    lines = Path("models/sentences", file).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines][:count]
    tokens = [language.tokens(REVIEW.format(text=row["text"]))[-LONGEST:] for row in rows]
    padded = nn.utils.rnn.pad_sequence([torch.tensor(t) for t in tokens], batch_first=True)
    labels = torch.tensor([int(row["label"] == "positive") for row in rows])
    return padded, torch.tensor([len(t) for t in tokens]), labels


def loss_fn(scores, targets):
    """Cross-entropy of each review."""
    return F.cross_entropy(scores, targets, reduction="none")


@torch.inference_mode()
def accuracy(model, tokens, lengths, labels):
    """Share of reviews whose word is the more probable of the two."""
    return float((model(tokens, lengths).argmax(1) == labels).float().mean())


def train(language, seed, steps):
    """Accuracy on held-out reviews before and after."""
    model = Classifier(language)
    tokens, lengths, labels = reviews(language, "train.jsonl", TRAIN)
    held_out = reviews(language, "test.jsonl", HELD_OUT)
    noise = LikelihoodRatio("auto", shaping=Shaping())  # sigma above the rounding of llama.cpp
    groups = [Group(model.prompt, noise, queries=QUERIES)]
    fg = ForwardGradient(model, loss_fn, groups, seed=seed)
    optimizer = torch.optim.Adam(model.prompt.parameters(), RATE)
    order = torch.Generator().manual_seed(seed)
    before, began = accuracy(model, *held_out), time.perf_counter()
    for _ in track(range(steps), description=f"seed {seed}"):
        rows = torch.randint(len(tokens), (BATCH,), generator=order)
        optimizer.zero_grad()
        fg.estimate({"tokens": tokens[rows], "lengths": lengths[rows]}, labels[rows], index=rows)
        optimizer.step()
    seconds, after = (time.perf_counter() - began) / steps, accuracy(model, *held_out)
    print(f"seed {seed}: accuracy {before:.3f} -> {after:.3f}, {seconds:.2f} s per step")
    return after


def main():
    """Tune prompts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    language = load_gguf("smollm2")
    found = [train(language, seed, options.steps) for seed in range(options.seeds)]
    if len(found) > 1:
        spread = statistics.stdev(found)
        print(f"{len(found)} seeds: {statistics.mean(found):.3f} ± {spread:.3f}")


if __name__ == "__main__":
    main()
