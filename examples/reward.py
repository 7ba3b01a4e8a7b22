"""Reward a property of generated text, and learn it with forward passes only.

SmolLM2-135M (`make real-models`) is asked for the sentiment of reviews in one word, and chats
instead. The reward is a function of the answer's text: 1 for the right word alone, less for more
words. Neither it nor greedy decoding has a derivative. Learned is a steering vector, which is added
to the hidden state before the answer; noise goes there, with a draw of its own for every answer.

    python examples/reward.py [seeds] [steps]
"""

import json
import sys
from pathlib import Path

import torch
from rich.progress import track
from torch import nn
from transformers import DynamicCache

from flops import ForwardGradient, Group, LikelihoodRatio
from flops.losses import reward
from flops.tasks.models.language import load_language

SEEDS = int(sys.argv[1]) if sys.argv[1:] else 1
STEPS = int(sys.argv[2]) if sys.argv[2:] else 30
TRAIN, HELD_OUT, BATCH, QUERIES, SIGMA, RATE = 256, 200, 32, 8, 2.5, 0.3
LAYER, LENGTH = 12, 4  # where the vector is added; tokens of an answer
QUESTION = "Answer with one word, positive or negative. {text}"
WORDS = ("negative", "positive")


class Vector(nn.Module):
    """The steering vector."""

    def __init__(self, width):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(width))

    def forward(self, hidden):
        return hidden + self.value


class Steered(nn.Module):
    """A layer, and the steering vector on its output while `on`."""

    def __init__(self, layer, vector):
        super().__init__()
        self.layer, self.vector, self.on = layer, vector, False

    def forward(self, *args, **options):
        hidden = self.layer(*args, **options)
        return self.vector(hidden) if self.on else hidden


class Answers(nn.Module):
    """Greedy answers to cached questions, (rows, LENGTH) tokens."""

    def __init__(self, lm):
        super().__init__()
        self.lm, self.vector = lm, Vector(lm.config.hidden_size)
        layer = lm.model.layers[LAYER]
        self.steered = Steered(getattr(layer, "layer", layer), self.vector)
        lm.model.layers[LAYER] = self.steered

    def forward(self, keys, values, mask, last):
        cache = DynamicCache()
        for layer in range(keys.shape[1]):
            cache.update(keys[:, layer], values[:, layer], layer)
        tokens = [last]
        for place in range(LENGTH):
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            self.steered.on = place == 0
            out = self.lm(
                tokens[-1][:, None],
                attention_mask=mask,
                position_ids=mask.sum(1, keepdim=True) - 1,
                past_key_values=cache,
                use_cache=True,
            )
            tokens.append(out.logits[:, -1].argmax(-1))
        return torch.stack(tokens[1:], 1)


class Reviews:
    """Questions about reviews, and their labels.

    All but the last token of a question is before the noise: its keys and values are computed once.
    """

    def __init__(self, split, count, language):
        lines = Path(f"models/sentences/{split}.jsonl").read_text(encoding="utf-8").splitlines()
        reviews = [json.loads(line) for line in lines[:count]]
        self.labels = torch.tensor([WORDS.index(review["label"]) for review in reviews])
        language.tokenizer.padding_side = "left"
        rows = language.tokenizer.apply_chat_template(
            [[{"role": "user", "content": QUESTION.format(**review)}] for review in reviews],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids, mask = rows["input_ids"][:, :-1], rows["attention_mask"][:, :-1]
        parts = zip(ids.split(8), mask.split(8), strict=True)
        found = [self._cached(language.model, *part) for part in parts]
        keys, values = (torch.cat(parts) for parts in zip(*found, strict=True))
        self.inputs = {
            "keys": keys,
            "values": values,
            "mask": mask,
            "last": rows["input_ids"][:, -1],
        }

    @torch.no_grad()
    def _cached(self, lm, ids, mask):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = lm(
            ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1
        ).past_key_values
        layers = cache.layers
        return torch.stack([x.keys for x in layers], 1), torch.stack([x.values for x in layers], 1)

    def __getitem__(self, rows):
        return {name: values[rows] for name, values in self.inputs.items()}, self.labels[rows]


def main() -> None:
    language = load_language("smollm2")
    end = language.tokenizer.eos_token_id

    def text(tokens):
        tokens = tokens.tolist()
        return language.tokenizer.decode(tokens[: [*tokens, end].index(end)]).strip()

    @reward
    def right_word(answers, labels):
        rewards = []
        for tokens, label in zip(answers, labels, strict=True):
            words = text(tokens).lower().split()
            rewards.append(words.count(WORDS[label]) / max(len(words), 1))
        return rewards

    @torch.inference_mode()
    def evaluate(model, data):
        answers = torch.cat([model(**data[r][0]) for r in torch.arange(HELD_OUT).split(50)])
        return -right_word(answers, data.labels).mean().item(), [text(row) for row in answers[:4]]

    train, held_out = Reviews("train", TRAIN, language), Reviews("test", HELD_OUT, language)
    for seed in range(SEEDS):
        model = Answers(language.model)
        groups = Group([model.vector], LikelihoodRatio(SIGMA), queries=QUERIES)
        fg = ForwardGradient(model, right_word, groups, seed=seed, chunk=64)
        optimizer = torch.optim.Adam(model.vector.parameters(), RATE)
        before, answers = evaluate(model, held_out)
        print(f"seed {seed}: held-out reward {before:.3f}, answers {answers}")
        order, rewards = torch.Generator().manual_seed(seed), []
        for step in track(range(STEPS), description="steps"):
            rows = torch.randperm(TRAIN, generator=order)[:BATCH]
            optimizer.zero_grad()
            rewards.append(-fg.estimate(*train[rows], index=rows).loss)
            optimizer.step()
            if step % 10 == 9:
                print(f"step {step + 1}: mean reward of the last ten {sum(rewards[-10:]) / 10:.3f}")
        after, answers = evaluate(model, held_out)
        print(f"seed {seed}: held-out reward {before:.3f} -> {after:.3f}, answers {answers}")


if __name__ == "__main__":
    main()
