"""`flops align`: runs, resuming, the report, other models, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from flops.cli.main import main
from flops.errors import FlopsError
from flops.tasks.alignment.config import PRESETS, AlignConfig, AlignMethod, AlignPreset
from flops.tasks.alignment.models import load_encoder, load_language
from flops.training.config import ConfigError, preset_settings
from flops.training.loop import NullDisplay, train

SMALL = AlignConfig(
    limit=20, batch=32, queries=4, epochs=2, checkpoint_steps=2, checkpoint_seconds=None, samples=2
)


def small(**changed: Any) -> AlignConfig:
    return SMALL.replace(**changed)


class Stopped(Exception):
    pass


class Stopper(NullDisplay):
    def step(self, trainer: Any, line: dict[str, Any]) -> None:
        if line["step"] == 5:
            raise Stopped


@pytest.mark.parametrize("method", get_args(AlignMethod))
def test_every_method_runs(method: AlignMethod) -> None:
    found = train(small(method=method, epochs=1, queries=8))
    assert found.steps == 4
    assert found.queries == (0 if method == "bp" else 8 * 100)
    first, last = found.evaluations
    assert last.loss != first.loss
    assert 0 <= last.accuracy <= 1


def test_a_run_folder_and_its_report(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    given = ["--limit", "20", "--epochs", "1", "--method", "bp", "--samples", "3"]
    main(["align", *given, "--learning-rate", "5e-3", "--output", str(folder)])
    assert "results are in" in capsys.readouterr().out
    report = (folder / "report.md").read_text()
    assert "| caption | before | after |" in report
    said = [line.split("|")[1:4] for line in report.splitlines()[-3:]]
    assert all(caption.strip().endswith(".") and before.strip() for caption, before, _ in said)
    assert any(before != after for _, before, after in said)
    assert (folder / "curves.png").is_file()
    weights = load_file(folder / "model" / "adapter.safetensors")
    assert {name: tuple(w.shape) for name, w in weights.items()} == {
        "weight": (64, 64),
        "bias": (64,),
    }


def test_a_stopped_run_goes_on_bit_for_bit_and_keeps_the_adapter_alone(tmp_path: Path) -> None:
    whole = small(method="shaped-lr", output=str(tmp_path / "whole"))
    broken = whole.replace(output=str(tmp_path / "broken"))
    train(whole)
    with pytest.raises(Stopped):
        train(broken, display=Stopper())
    train(broken, resume=True)
    found = [load_file(tmp_path / n / "model" / "adapter.safetensors") for n in ("whole", "broken")]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    lines = [(tmp_path / n / "metrics.jsonl").read_text().splitlines() for n in ("whole", "broken")]
    kept = [[{**json.loads(line), "seconds": 0} for line in each] for each in lines]
    assert kept[0] == kept[1]
    (file, *_) = sorted((tmp_path / "whole" / "checkpoints").rglob("*.safetensors"))
    with safe_open(file, "pt") as content:
        names = list(content.keys())
    assert not [name for name in names if "language" in name]


def test_a_cosine_ends_at_nothing() -> None:
    from flops.training.trainer import Trainer

    trainer, rates = Trainer(small(method="bp", learning_rate=1.0)), []
    for _ in range(8):
        trainer.step()
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates[0] == 1.0
    assert rates == sorted(rates, reverse=True)
    assert rates[4] == pytest.approx(0.5)
    assert 0 < rates[-1] < 0.05


def test_resuming_refuses_other_settings_and_other_runs(tmp_path: Path) -> None:
    train(small(method="bp", epochs=1, output=str(tmp_path / "run")))
    with pytest.raises(SystemExit, match="leave out queries"):
        main(["align", "--resume", str(tmp_path / "run"), "--queries", "5"])
    with pytest.raises(SystemExit, match="run is a run of another command or --task"):
        main(["finetune", "--resume", str(tmp_path / "run")])


def test_presets_have_known_settings() -> None:
    assert set(get_args(AlignPreset)) == set(PRESETS)
    for name in PRESETS:
        AlignConfig(**PRESETS[name])
    paper = AlignConfig(**PRESETS["paper"])
    assert (paper.batch, paper.queries, paper.learning_rate) == (64, 60, 5e-4)
    assert (paper.schedule, paper.epochs, paper.optimizer) == ("cosine", 1, "adam")
    with pytest.raises(ConfigError, match="preset must be one of"):
        preset_settings(PRESETS, "large")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"language": "nobody"}, "no causal language model 'nobody': give 'bundled'"),
        ({"language": "none.gguf"}, "no file none.gguf"),
        ({"encoder": "nobody"}, "no visual encoder 'nobody'"),
        ({"data": "nothing"}, "no data 'nothing'"),
    ],
)
def test_what_is_not_there_is_explained(given: dict[str, Any], message: str) -> None:
    with pytest.raises(FlopsError, match=message):
        train(small(**given))


def test_wrong_settings_are_explained() -> None:
    with pytest.raises(ConfigError, match="visual_tokens must be greater than 0"):
        AlignConfig(visual_tokens=0)
    with pytest.raises(ConfigError, match="samples must be at least 0, not -1"):
        AlignConfig(samples=-1)
    with pytest.raises(ConfigError, match="noise must be"):
        AlignConfig(noise="pink")


def clip(folder: Path) -> Path:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.CLIPConfig(
        text_config={**small, "num_attention_heads": 2, "vocab_size": 60},
        vision_config={**small, "num_attention_heads": 2, "image_size": 32, "patch_size": 16},
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    return folder


def gpt(folder: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = load_language().tokenizer
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=64
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_other_models_from_folders_with_several_tokens(tmp_path: Path) -> None:
    encoder, language = clip(tmp_path / "clip"), gpt(tmp_path / "gpt")
    config = small(
        encoder=str(encoder), language=str(language), visual_tokens=3, epochs=1, method="ops-lr"
    )
    found = train(config.replace(output=str(tmp_path / "run")))
    assert found.steps == 4
    weights = load_file(tmp_path / "run" / "model" / "adapter.safetensors")
    assert weights["weight"].shape == (3 * 16, 16)
    pixels = torch.randn(2, 3, 32, 32)
    vision = transformers.CLIPModel.from_pretrained(encoder).vision_model
    assert torch.allclose(load_encoder(str(encoder)).features(pixels), vision(pixels).pooler_output)


def test_a_language_model_in_a_gguf_file(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    path = tmp_path / "tiny.gguf"
    write_gguf(gguf, path, model)
    found = load_language(str(path))
    ids = torch.arange(5)[None]
    with torch.no_grad():
        assert torch.allclose(found.model(ids).logits, model(ids).logits, atol=1e-5)
    assert not any(p.requires_grad for p in found.model.parameters())
    assert found.caption("ab")[-1] == found.end == 2


def write_gguf(gguf: Any, path: Path, model: Any) -> None:
    """The least that a reader of Llama wants, in float32."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    letters = [*(chr(ord("a") + i) for i in range(26)), "ab", *(f"<{i}>" for i in range(10))]
    writer.add_token_list(["<unk>", "<s>", "</s>", *letters])
    writer.add_token_types([3, 3, 3, *[1] * 37])
    writer.add_token_merges(["a b"])
    for name, number in (("bos", 1), ("eos", 2), ("unk", 0)):
        getattr(writer, f"add_{name}_token_id")(number)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    inner = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    names |= {f"model.layers.0.{ours}": f"blk.0.{theirs}" for ours, theirs in inner.items()}
    heads = config.num_attention_heads
    for name, tensor in model.state_dict().items():
        value = tensor
        if "q_proj" in name or "k_proj" in name:  # llama.cpp keeps the halves of rotary interleaved
            value = tensor.view(heads, 2, -1, tensor.size(1)).swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(names[name.removesuffix(".weight")] + ".weight", value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
