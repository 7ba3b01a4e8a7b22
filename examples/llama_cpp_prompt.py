"""Tune a soft prompt for a 4-bit language model in llama.cpp, with forward passes only.

SmolLM2-135M (`make real-models`) stays quantised in llama.cpp, which has no backward pass. It is
asked whether reviews are positive, by the probabilities of two words. Learned are four vectors
before each review: noise goes on them, through llama.cpp, to the loss.

    python examples/llama_cpp_prompt.py [--seeds 3] [--steps 30]
    python examples/llama_cpp_prompt.py --validation --rate 0.003  # how the rate was chosen
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import nn

from flops import ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.tasks.models.language import load_gguf
from flops.tasks.text.config import TextConfig
from flops.tasks.text.data import load_texts

BATCH, QUERIES, RATE, VECTORS = 8, 8, 1e-2, 4
TRAIN, HELD_OUT, LONGEST = 512, 200, 32
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


def reviews(language, split, count):
    """Padded tokens, their number and the class of each review."""
    tokens = [language.tokens(REVIEW.format(text=text))[-LONGEST:] for text in split.texts[:count]]
    padded = nn.utils.rnn.pad_sequence([torch.tensor(t) for t in tokens], batch_first=True)
    return padded, torch.tensor([len(t) for t in tokens]), split.labels[:count]


def loss_fn(scores, targets):
    """Cross-entropy of each review."""
    return F.cross_entropy(scores, targets, reduction="none")


@torch.inference_mode()
def accuracy(model, tokens, lengths, labels):
    """Share of reviews whose word is the more probable of the two."""
    return float((model(tokens, lengths).argmax(1) == labels).float().mean())


def train(language, seed, options):
    """Accuracy on held-out reviews before and after."""
    steps = options.steps
    model = Classifier(language)
    data = load_texts("sentences", TextConfig().named_columns())
    tokens, lengths, labels = reviews(language, data.train, TRAIN)
    held_out = data.validation if options.validation else data.test
    held_out = reviews(language, held_out, HELD_OUT)
    noise = LikelihoodRatio("auto", shaping=Shaping())  # sigma above the rounding of llama.cpp
    groups = [Group(model.prompt, noise, queries=QUERIES)]
    fg = ForwardGradient(model, loss_fn, groups, seed=seed)
    optimizer = torch.optim.Adam(model.prompt.parameters(), options.rate)
    order = torch.Generator().manual_seed(seed)
    before, began = accuracy(model, *held_out), time.perf_counter()
    for _ in track(range(steps), description=f"seed {seed}"):
        rows = torch.randperm(len(tokens), generator=order)[:BATCH]
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
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--validation", action="store_true")
    options = parser.parse_args()
    language = load_gguf("smollm2")
    found = [train(language, seed, options) for seed in range(options.seeds)]
    if len(found) > 1:
        spread = statistics.stdev(found)
        print(f"{len(found)} seeds: {statistics.mean(found):.3f} ± {spread:.3f}")


if __name__ == "__main__":
    main()
