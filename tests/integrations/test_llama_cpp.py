"""A language model in llama.cpp as a frozen module; needs `make real-models`."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from flops.errors import BackwardError
from flops.integrations.llama_cpp import LlamaCppError, LlamaCppModule
from flops.tasks.alignment.language import PrefixLanguage
from flops.tasks.models.language import REAL_MODELS, SMOLLM2, Language, load_language

ROOT = Path(__file__).parents[2]
ROWS, VECTORS, LENGTH = 5, 2, 6
needs_llama_cpp = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llama_cpp") is None
        or not (ROOT / REAL_MODELS / SMOLLM2).is_dir(),
        reason="run `make real-models` first",
    ),
]
pytestmark = needs_llama_cpp


@pytest.fixture(scope="module")
def gguf() -> Path:
    return next((ROOT / REAL_MODELS / SMOLLM2).glob("*.gguf"))


@pytest.fixture(scope="module")
def dequantised(gguf: Path) -> Language:
    """The same weights in float32, in torch."""
    return load_language(str(gguf))


@pytest.fixture(scope="module")
def prefix(dequantised: Language) -> torch.Tensor:
    return dequantised.prefix_tokens("scarf this is a scarf.\nboot this is a boot.\n")


@pytest.fixture(scope="module")
def module(gguf: Path, prefix: torch.Tensor) -> LlamaCppModule:
    return LlamaCppModule(gguf, prefix=prefix, rows=4)  # fewer than the rows below


def inputs(module: LlamaCppModule, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    words = torch.randint(100, 4000, (rows, VECTORS + LENGTH), generator=source)
    return module.embeddings(words[:, :VECTORS]), words[:, VECTORS:]


def test_logits_are_those_of_the_dequantised_model_up_to_8_bit_activations(
    module: LlamaCppModule, dequantised: Language, prefix: torch.Tensor
) -> None:
    vectors, tokens = inputs(module)
    reference = PrefixLanguage(dequantised.model, prefix)
    with torch.no_grad():
        wanted = reference(vectors, tokens).log_softmax(-1)
    found = module(vectors, tokens).log_softmax(-1)
    assert found.shape == wanted.shape == (ROWS, 1 + LENGTH, module.vocabulary)
    centred = [x - x.mean(-1, keepdim=True) for x in (found, wanted)]
    cosine = torch.cosine_similarity(*centred, dim=-1)
    assert float(cosine.min()) > 0.99
    other = torch.cosine_similarity(centred[0].roll(1, 0), centred[1], dim=-1)
    assert float(other.mean()) < 0.95  # rows are told apart


def test_embeddings_are_those_of_the_model(module: LlamaCppModule, dequantised: Language) -> None:
    words = torch.tensor([[5, 900], [17, 3]])
    table = dequantised.model.get_input_embeddings().weight
    assert torch.allclose(module.embeddings(words), table[words], atol=1e-6)
    assert module.embedding_scale() == pytest.approx(float(table.pow(2).mean().sqrt()), rel=1e-4)


def test_a_prefix_of_tokens_is_one_of_their_vectors(
    module: LlamaCppModule, gguf: Path, prefix: torch.Tensor
) -> None:
    vectors, tokens = inputs(module)
    before = module.embeddings(prefix).expand(ROWS, -1, -1)
    found = LlamaCppModule(gguf, rows=8)(torch.cat([before, vectors], 1), tokens)
    wanted = module(vectors, tokens)
    centred = [x - x.mean(-1, keepdim=True) for x in (found, wanted)]
    assert float(torch.cosine_similarity(*centred, dim=-1).min()) > 0.99


def test_rows_do_not_depend_on_the_batch_or_on_what_ran_before(module: LlamaCppModule) -> None:
    vectors, tokens = inputs(module)
    first = module(vectors, tokens)
    longer = module(vectors.repeat(1, 200, 1), tokens)  # a new context, with more positions
    assert longer.isfinite().all()
    assert torch.allclose(module(vectors, tokens), first, atol=1e-3)
    single = torch.cat([module(v[None], t[None]) for v, t in zip(vectors, tokens, strict=True)])
    assert torch.allclose(single, first, atol=1e-3)
    shorter = module(vectors, tokens[:, :3])
    assert torch.allclose(shorter, first[:, :4], atol=1e-3)


def test_logits_at_one_place_of_each_row(module: LlamaCppModule) -> None:
    vectors, tokens = inputs(module)
    at = torch.tensor([0, 6, 3, 0, 1])
    found = module(vectors, tokens, at)
    assert found.shape == (ROWS, module.vocabulary)
    assert torch.allclose(found, module(vectors, tokens)[torch.arange(ROWS), at], atol=1e-3)
    assert module(vectors[:0], tokens[:0], at[:0]).shape == (0, module.vocabulary)


def test_tokens_of_a_row_before_the_vectors_are_their_vectors(module: LlamaCppModule) -> None:
    vectors, tokens = inputs(module, 6)
    words = torch.tensor(
        [[50, 60, 70], [50, 60, -1], [50, 60, 70], [8, -1, -1], [-1] * 3, [8, 9, 5]]
    )
    found = module(vectors, tokens, before=words)  # two passes, rows with the same text in one
    assert found.shape == (6, 1 + LENGTH, module.vocabulary)
    for row, text in enumerate(words):
        whole = torch.cat([module.embeddings(text[text >= 0]), vectors[row]])
        wanted = module(whole[None], tokens[row : row + 1])[0]
        centred = [x - x.mean(-1, keepdim=True) for x in (found[row], wanted)]
        assert float(torch.cosine_similarity(*centred, dim=-1).min()) > 0.99
    at = torch.tensor([0, 6, 3, 0, 1, 2])
    one = module(vectors, tokens, at, words)
    assert torch.allclose(one, found[torch.arange(6), at], atol=1e-3)


def test_rows_with_the_same_tokens_before_share_their_keys(module: LlamaCppModule) -> None:
    vectors, tokens = inputs(module, 4)
    text = torch.arange(300, 330).expand(4, -1)
    shared = module(vectors, tokens, before=text)
    single = [module(vectors[i : i + 1], tokens[i : i + 1], before=text[:1]) for i in range(4)]
    assert torch.allclose(shared, torch.cat(single), atol=1e-3)
    plain = module(vectors, tokens)  # nothing of the text stays behind
    assert torch.allclose(plain[:1], module(vectors[:1], tokens[:1]), atol=1e-3)
    assert not torch.allclose(plain, shared, atol=0.1)


def test_wrong_inputs_are_named(module: LlamaCppModule, gguf: Path, tmp_path: Path) -> None:
    vectors, tokens = inputs(module)
    with pytest.raises(LlamaCppError, match=r"\(B, N, 576\)"):
        module(vectors[..., :10], tokens)
    with pytest.raises(LlamaCppError, match="not among the"):
        module(vectors, tokens + 10**6)
    with pytest.raises(LlamaCppError, match="at must be 0 to 6"):
        module(vectors, tokens, torch.full((ROWS,), 7))
    with pytest.raises(LlamaCppError, match="padded with -1 at the end"):
        module(vectors, tokens, before=torch.tensor([[-1, 3]]).expand(ROWS, -1))
    with pytest.raises(LlamaCppError, match=r"\(B, P\) for 5 rows, not \(2, 3\)"):
        module(vectors, tokens, before=torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(LlamaCppError, match="not among the"):
        module(vectors, tokens, before=tokens + 10**6)
    with pytest.raises(LlamaCppError, match="the prefix"):
        LlamaCppModule(gguf, prefix=[10**6])
    with pytest.raises(ValueError, match="rows must be 1 to 256"):
        LlamaCppModule(gguf, rows=0)
    with pytest.raises(FileNotFoundError, match="GGUF"):
        LlamaCppModule(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(LlamaCppError, match="cannot load"):
        LlamaCppModule(tmp_path / "text.gguf")


def test_it_is_frozen_copied_and_pickled(module: LlamaCppModule) -> None:
    vectors, tokens = inputs(module, 2)
    assert not list(module.parameters())
    assert not module.state_dict()
    assert "width=576" in repr(module)
    first = module(vectors, tokens)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.allclose(other(vectors, tokens), first, atol=1e-3)
    with pytest.raises(BackwardError, match=r"llama\.cpp has no backward pass"):
        module(vectors.requires_grad_(), tokens).sum().backward()


def test_derivatives_through_it_are_those_of_the_dequantised_model(
    module: LlamaCppModule, dequantised: Language, prefix: torch.Tensor
) -> None:
    word, caption = (torch.tensor([dequantised.tokens(t)]) for t in (" shoe", " this is a shoe."))
    start = module.embeddings(word[:, :1])
    reference = PrefixLanguage(dequantised.model, prefix)
    vectors = start.clone().requires_grad_()
    losses(reference, vectors, caption).sum().backward()
    z = torch.randn(12, *start.shape[1:], generator=torch.Generator().manual_seed(0))
    wanted = z.flatten(1) @ vectors.grad.flatten()
    cosines = {}
    for sigma in (1e-4, 0.03):
        plus, minus = (losses(module, start + s * z, caption) for s in (sigma, -sigma))
        found = (plus - minus) / (2 * sigma)
        cosines[sigma] = float(torch.cosine_similarity(found, wanted, dim=0))
    assert cosines[0.03] > 0.6
    assert cosines[1e-4] < cosines[0.03]  # below the steps of 8-bit activations


def losses(language: nn.Module, vectors: torch.Tensor, caption: torch.Tensor) -> torch.Tensor:
    caption = caption.expand(len(vectors), -1)
    found = language(vectors, caption[:, :-1]).log_softmax(-1)
    return -found.gather(-1, caption[..., None]).mean((1, 2))
