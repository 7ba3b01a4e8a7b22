"""Names of methods for people, in figures and on report pages."""

from __future__ import annotations

METHOD_NAMES = {
    "bp": "backpropagation",
    "mezo": "MeZO",
    "fzoo": "FZOO",
    "lozo": "LOZO",
    "jvp": "forward gradient",
    "spsa": "SPSA",
    "n-spsa": "SPSA per point",
    "deepzero": "DeepZero",
    "lr": "likelihood ratio",
    "ops-spsa": "SPSA, learned allocation",
    "ops-lr": "likelihood ratio, learned allocation",
    "shaped-lr": "shaped likelihood ratio (ours)",
    "cma-es": "CMA-ES",
    "manual": "hand-written prompt",
    "start": "start",
    "zero-shot": "before training",
}


def method_name(spelled: str) -> str:
    """A method's name for people, such as "MeZO + LoRA" for mezo+lora; unknown ones as they are."""
    name, *parts = spelled.split("+")
    said = {"lora": "LoRA", "all": "all layers"}
    kinds = [said.get(part, part.replace("last", "last ")) for part in parts]
    return " + ".join([METHOD_NAMES.get(name, name), *kinds])
