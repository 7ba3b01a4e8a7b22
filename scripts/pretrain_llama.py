"""Pretrain the bundled tiny language model on captions, by ordinary backpropagation.

The default language model of `flops align`: a Llama small enough to ship with the package. It is
trained on texts only, never on images.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.progress import Progress
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flops.tasks.data.captions import INSTRUCTION, TEMPLATES, noun
from flops.tasks.data.images import FASHION_CLASSES

ASSET = Path(__file__).resolve().parents[1] / "src" / "flops" / "tasks" / "assets" / "tiny-llama"
# Nouns besides the garments of Fashion-MNIST, so that captions are not limited to ten classes.
OTHERS = """hat scarf glove sock belt jacket skirt sweater jersey vest suit tie slipper boot heel
backpack purse wallet umbrella watch ring necklace cap hood robe apron blouse cardigan blazer jeans
cat dog bird horse fish tree flower house car boat plane train cup table chair lamp book ball"""
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
PAD, BOS, EOS = 0, 2, 3
IGNORED = -100

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# tiny-llama

A language model of Llama's architecture of {parameters:,} parameters in float32, for trying to
align it with an image encoder on a CPU. It knows {words} words and generates captions; it is
meant for experiments and tests only.

- Model: {layers} layers, {width} channels, {heads} heads, {inner} channels inside the MLP.
- Texts: captions of {nouns} nouns in {templates} templates, alone, two of the same noun in
  sequence, or after an instruction and the noun: `{instruction} bag a photo of a bag.`
  No images and no other texts were used.

## Training

Backpropagation with AdamW: {steps} steps of {batch} random texts; the learning rate warms
up to {learning_rate:g} and falls as a cosine. The last step's weights are used.

```
{command}
```

The same command on the same machine with the same versions gives the same weights, bit for bit.
Made with torch {torch} and transformers {transformers}, on one CPU thread.

Loss per token on 2,000 new texts: {loss:.4f}; the lower bound is the entropy of the
distribution of texts, {least:.4f}.
"""


def nouns() -> list[str]:
    """All nouns, with their articles."""
    return [noun(name) for name in (*FASHION_CLASSES, *OTHERS.split())]


def new_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word; full stops and colons are separate tokens."""
    words = " ".join([*TEMPLATES, INSTRUCTION, *nouns()]).replace("{}", " ")
    for mark in ".:":
        words = words.replace(mark, f" {mark} ")
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *sorted(set(words.split()))])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("[.:,?!]"), "isolated")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
    )


def new_model(vocabulary: int) -> LlamaForCausalLM:
    """The untrained model, initialised from torch's global generator."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


class Texts:
    """Random texts, as tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, generator: torch.Generator) -> None:
        def tokens(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        self._instruction = tokens(INSTRUCTION)
        self._names = [tokens(name.split(" ", 1)[1]) for name in nouns()]
        self._captions = [[tokens(t.format(name)) for t in TEMPLATES] for name in nouns()]
        self._generator = generator

    def draw(self, count: int) -> Tensor:
        """Token ids, padded at the end, (count, length)."""
        texts = [torch.tensor(self._one()) for _ in range(count)]
        return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PAD)

    def _one(self) -> list[int]:
        thing, kind = self._choose(len(self._names)), self._choose(3)
        captions = self._captions[thing]
        first, second = captions[self._choose(len(captions))], captions[self._choose(len(captions))]
        if kind == 0:
            return [BOS, *first, EOS]
        if kind == 1:
            return [BOS, *first, *second, EOS]
        return [BOS, *self._instruction, *self._names[thing], *first, EOS]

    def _choose(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self._generator))

    def entropy(self) -> float:
        """Entropy of a text in nats: kind, noun and templates; the rest is deterministic."""
        things, templates = math.log(len(self._names)), math.log(len(TEMPLATES))
        return math.log(3) + things + 4 / 3 * templates


def losses(model: LlamaForCausalLM, texts: Tensor) -> Tensor:
    """Loss of every token but the first, without padding."""
    wanted = texts[:, 1:].masked_fill(texts[:, 1:] == PAD, IGNORED)
    logits = model(texts[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none")


def schedule(step: int, steps: int) -> float:
    """The share of the peak learning rate: linear over 5 % of the steps, then a cosine."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def train(
    model: LlamaForCausalLM, texts: Texts, given: argparse.Namespace, console: Console
) -> None:
    """Train in place, and print the loss periodically."""
    optimizer = torch.optim.AdamW(model.parameters(), given.learning_rate, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: schedule(s, given.steps))
    model.train()
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("pretraining", total=given.steps)
        for step in range(1, given.steps + 1):
            batch = texts.draw(given.batch)
            loss = losses(model, batch).sum() / (batch[:, 1:] != PAD).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            progress.advance(task)
            if step % max(1, given.steps // 10) == 0:
                console.print(f"step {step}/{given.steps}: loss {loss.item():.4f}")
    model.eval()


def write(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    texts: Texts,
    given: argparse.Namespace,
) -> float:
    """Evaluate, and write model, tokenizer and card."""
    fresh = texts.draw(2000)
    count = int((fresh[:, 1:] != PAD).sum())
    with torch.inference_mode():
        loss = float(losses(model, fresh).sum()) / count
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(given.out)
    (given.out / "model.safetensors").chmod(
        0o644
    )  # safetensors makes it readable by its owner only
    tokenizer.save_pretrained(given.out)
    command = "python scripts/pretrain_llama.py"
    for name in ("steps", "batch", "learning_rate", "seed"):
        value = getattr(given, name)
        if value != command_line().get_default(name):
            command += f" --{name.replace('_', '-')} {value}"
    config = model.config
    card = CARD.format(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        words=config.vocab_size - len(SPECIAL),
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        inner=config.intermediate_size,
        nouns=len(nouns()),
        templates=len(TEMPLATES),
        instruction=INSTRUCTION,
        steps=given.steps,
        batch=given.batch,
        learning_rate=given.learning_rate,
        command=command,
        torch=torch.__version__,
        transformers=transformers.__version__,
        loss=loss,
        least=texts.entropy() * len(fresh) / count,
    )
    (given.out / "README.md").write_text(card, encoding="utf-8")
    return loss


def command_line() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nWrites the files of a Hugging Face model with its tokenizer.",
        epilog="examples:\n"
        "  python scripts/pretrain_llama.py\n"
        "      remake the bundled model (minutes on one core)\n"
        "  python scripts/pretrain_llama.py --steps 50 --out /tmp/llama\n"
        "      see it run, in seconds, without touching the bundled model",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    out = "output folder (default: the assets of the package, which are replaced)"
    add("--out", type=Path, default=ASSET, metavar="FOLDER", help=out)
    add("--steps", type=int, default=2000, help="steps of training (%(default)s)")
    add("--batch", type=int, default=128, help="texts per step (%(default)s)")
    add("--learning-rate", type=float, default=3e-3, help="peak learning rate (%(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and texts (%(default)s)")
    return parser


def main() -> None:
    """Run the command line."""
    parser = command_line()
    given = parser.parse_args()
    if given.steps < 1 or given.batch < 1:
        parser.error("steps and batch must be at least 1")
    console = Console(highlight=False, soft_wrap=True)
    # One thread: the order of summation is fixed, so runs are bitwise reproducible.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(given.seed)
    given.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    tokenizer = new_tokenizer()
    model = new_model(len(tokenizer))
    texts = Texts(tokenizer, torch.Generator().manual_seed(given.seed))
    train(model, texts, given, console)
    loss = write(model, tokenizer, texts, given)
    minutes = (time.perf_counter() - started) / 60
    console.print(f"loss {loss:.4f}, {minutes:.1f} min, in {given.out}")


if __name__ == "__main__":
    main()
