"""Tune a soft prompt of a 4-bit language model in llama.cpp, with forward passes only.

SmolLM2-135M (`make real-models`) stays quantised in llama.cpp, which has no backward pass. It reads
a sentence of a review, " It" and a vector in the place of " was"; the more probable one of two
words, " terrible" and " great", is the class. Learned is the vector, 576 numbers that start as the
embedding of " was". llama.cpp returns the logits of both words with every answer, so shaped noise
learns their Jacobian from the queries of all steps (`Outputs`).

    python examples/llama_cpp_soft_prompt.py [--seeds 3] [--steps 24] [--rate 0.03]
    python examples/llama_cpp_soft_prompt.py --validation  # with a seed of its own
    python examples/llama_cpp_soft_prompt.py --sigmas      # rounding, by sigma

Sentences of the test split are read once, at the end. Needs the extras llm and llama-cpp.
"""

import argparse
import statistics
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from flops import LikelihoodRatio, Shaping
from flops.blackbox import Outputs, Tuner
from flops.integrations.llama_cpp import LlamaCppModule
from flops.tasks.models.language import load_gguf
from flops.tasks.text.config import TextConfig
from flops.tasks.text.data import load_texts

TRAIN, HELD_OUT, LONGEST = 64, 200, 24
BATCH, QUERIES, SIGMA, RATE, CHOICE = 16, 16, 0.05, 0.03, 100  # CHOICE: the seed for --validation
BEFORE, START, WORDS = " It", " was", (" terrible", " great")
SIGMAS = (0.003, 0.01, 0.03, 0.1)


class Sentences:
    """Logits of the two words after sentences and vectors."""

    def __init__(self, language, llama, split, count):
        ending = language.tokens(BEFORE)
        texts = [language.tokens(t)[-LONGEST:] + ending for t in split.texts[:count]]
        rows = [torch.tensor(text) for text in texts]
        self.tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        self.labels, self.llama = split.labels[:count], llama
        self.words = [language.tokens(word)[0] for word in WORDS]

    def logits(self, vectors, points):
        """Of each row, (Q, 2): its vector after the sentence of its point, read once per pass."""
        none = torch.empty(len(points), 0, dtype=torch.long)
        found = self.llama(vectors.unsqueeze(1), none, before=self.tokens[points])
        return found[:, 0, self.words]

    def losses(self, logits, points):
        return F.cross_entropy(logits, self.labels[points], reduction="none")

    def objective(self, vectors, points):
        """The loss of each row, then its logits."""
        logits = self.logits(vectors, points)
        return torch.cat([self.losses(logits, points).unsqueeze(1), logits], 1)

    def accuracies(self, vectors):
        """Share of sentences that each vector classifies correctly, in %, and its mean loss."""
        points = torch.arange(len(self.labels)).repeat(len(vectors))
        rows = torch.stack(vectors).repeat_interleave(len(self.labels), 0)
        logits = self.logits(rows, points)
        right = (logits.argmax(1) == self.labels[points]).float().view(len(vectors), -1)
        losses = self.losses(logits, points).view(len(vectors), -1)
        return (100 * right.mean(1)).tolist(), losses.mean(1).tolist()


def tune(sentences, start, options, seed):
    """The vector after some steps."""
    outputs = Outputs(of=lambda columns: columns[:, 1:], loss=sentences.losses)
    tuner = Tuner(
        start,
        sentences.objective,
        points=len(sentences.labels),
        batch=BATCH,
        queries=QUERIES,
        estimator=LikelihoodRatio(options.sigma, baseline="antithetic", shaping=Shaping()),
        outputs=outputs,
        learning_rate=options.rate,
        seed=seed,
    )
    for report in tuner.run(options.steps):
        explained = report.shaping["parameters"].explained_variance
        moved = float((tuner.parameters - start).norm())
        print(
            f"seed {seed}, step {tuner.steps}: {tuner.asked} rows, loss {report.loss:.3f}, "
            f"explained variance {explained:.2f}, distance {moved:.2f}",
            flush=True,
        )
    return tuner.parameters


def sigmas(sentences, start):
    """Differences of the two logits along random directions: odd part, even part, agreement."""
    points = torch.arange(16)
    noise = torch.randn(16, len(start), generator=torch.Generator().manual_seed(0))
    clean = _difference(sentences.logits(start.expand(16, -1), points))
    found = {}
    for sigma in SIGMAS:
        plus, minus = (
            _difference(sentences.logits(start + sign * sigma * noise, points)) for sign in (1, -1)
        )
        found[sigma] = (plus - minus) / (2 * sigma)
        even = ((plus + minus) / 2 - clean).pow(2).mean().sqrt()
        odd = ((plus - minus) / 2).pow(2).mean().sqrt()
        print(f"sigma {sigma}: odd part {odd:.3f}, even part {even:.3f}", flush=True)
    for sigma, other in pairwise(SIGMAS):
        cosine = F.cosine_similarity(found[sigma], found[other], 0)
        print(f"derivatives at sigma {sigma} and {other}: cosine {cosine:.2f}")


def _difference(logits):
    return logits[:, 1] - logits[:, 0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--sigma", type=float, default=SIGMA)
    parser.add_argument("--validation", action="store_true", help="leave the test split alone")
    parser.add_argument("--sigmas", action="store_true", help="sweep sigma instead of tuning")
    options = parser.parse_args()
    language = load_gguf("smollm2")
    llama = LlamaCppModule(language.model.path, rows=32)
    data = load_texts("sentences", TextConfig().named_columns())
    train = Sentences(language, llama, data.train, TRAIN)
    start = llama.embeddings(torch.tensor(language.tokens(START)))[0]
    if options.sigmas:
        sigmas(train, start)
        return
    seeds = [CHOICE] if options.validation else list(range(options.seeds))
    tuned = [tune(train, start, options, seed) for seed in seeds]
    split = data.validation if options.validation else data.test
    held_out = Sentences(language, llama, split, HELD_OUT)
    (before, *after), losses = held_out.accuracies([start, *tuned])
    name = "validation" if options.validation else "test"
    print(f"{name} accuracy before: {before:.1f} %, loss {losses[0]:.3f}")
    shown = ", ".join(f"{a:.1f} %, loss {x:.3f}" for a, x in zip(after, losses[1:], strict=True))
    print(f"{name} accuracy after, by seed: {shown}")
    if len(after) > 1:
        print(f"mean {statistics.mean(after):.1f} ± {statistics.stdev(after):.1f} %")


if __name__ == "__main__":
    main()
