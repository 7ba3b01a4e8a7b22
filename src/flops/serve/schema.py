"""Requests and answers: allowed shapes and values, and cost."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import from_json
from torch import Tensor

from flops.serve.codec import WireError, decode, encode

DIGEST = re.compile(r"[0-9a-f]{64}")
KEY = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
SCORE = {
    "rows": torch.int64,
    "text": torch.float32,
    "text_of": torch.int64,
    "image": torch.float32,
    "image_of": torch.int64,
}


@dataclass(frozen=True)
class Shape:
    """Widths of the model, and limits of a request."""

    classes: int
    text_width: int
    image_width: int
    text_tokens: int
    image_tokens: int
    rows: int
    texts: int
    points: int


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """Score row i: point `rows[i]` with text prompt `text_of[i]` and image prompt `image_of[i]`."""

    points: str
    rows: Tensor  # (Q,)
    text: Tensor  # (P, m_T, text_width)
    text_of: Tensor  # (Q,)
    image: Tensor  # (R, m_I, image_width)
    image_of: Tensor  # (Q,)

    def body(self) -> bytes:
        """Serialize."""
        tensors = {name: getattr(self, name) for name in SCORE}
        return encode(tensors, {"points": self.points})


@dataclass(frozen=True)
class RequestCost:
    """Cost of a request: rows, (text prompt, class) pairs and (point, image prompt) pairs.

    Distinct pairs within the request are counted, regardless of caches.
    """

    queries: int
    texts: int
    images: int


@dataclass(frozen=True, eq=False)
class Encodings:
    """Encodings needed for a request; equal inputs have equal names."""

    texts: list[bytes]  # digest of the text prompt of each row
    images: list[tuple[str, int, bytes]]  # points, point, digest of the image prompt of each row
    cost: RequestCost

    @classmethod
    def of(cls, request: ScoreRequest, classes: int) -> Encodings:
        """The encodings of every row, and their cost."""
        text, image = _digests(request.text), _digests(request.image)
        texts = [text[i] for i in request.text_of.tolist()]
        pairs = zip(request.rows.tolist(), request.image_of.tolist(), strict=True)
        images = [(request.points, point, image[i]) for point, i in pairs]
        return cls(
            texts, images, RequestCost(len(images), len(set(texts)) * classes, len(set(images)))
        )


def _digests(prompts: Tensor) -> list[bytes]:
    """A digest of each prompt's bytes (of the empty string for prompts without tokens)."""
    data = memoryview(prompts.contiguous().numpy().tobytes())
    size = len(data) // len(prompts)
    return [
        hashlib.blake2b(data[i * size : (i + 1) * size], digest_size=32).digest()
        for i in range(len(prompts))
    ]


Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Value = Annotated[float, Field(strict=True, allow_inf_nan=False)]


Prompts = Annotated[
    list[Annotated[list[Annotated[list[Value], FailFast()]], FailFast()]], FailFast()
]
INSTEAD = "send a large request as safetensors, application/octet-stream"
ELEMENTS = 2**17  # largest number of values, lists and objects in a JSON body


class ScoreBody(BaseModel):
    """The JSON form of a score request; each list is validated up to its first error."""

    model_config = ConfigDict(extra="forbid")
    points: Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="Digest of the points")]
    rows: Annotated[
        list[Count], FailFast(), Field(min_length=1, description="Indices of points, (Q,)")
    ]
    text: Annotated[Prompts, Field(min_length=1, description="(P, m_T, text_width)")]
    text_of: Annotated[
        list[Count], FailFast(), Field(min_length=1, description="Text prompt of each row")
    ]
    image: Annotated[Prompts, Field(min_length=1, description="(R, m_I, image_width)")]
    image_of: Annotated[
        list[Count], FailFast(), Field(min_length=1, description="Image prompt of each row")
    ]


def read_score(body: bytearray, shape: Shape, as_json: bool = False) -> ScoreRequest:
    """Parse and validate a request.

    Raises:
        WireError: It is invalid.
    """
    request = _from_json(body, shape) if as_json else _from_tensors(body)
    count = len(request.rows) if request.rows.ndim == 1 else 0
    if not 1 <= count <= shape.rows:
        raise WireError(f"rows is {_shape(request.rows)}; 1 to {shape.rows} rows are allowed")
    for kind, tokens, width, most in (
        ("text", shape.text_tokens, shape.text_width, shape.texts),
        ("image", shape.image_tokens, shape.image_width, shape.rows),
    ):
        prompts, of = getattr(request, kind), getattr(request, f"{kind}_of")
        fits = prompts.ndim == 3 and prompts.shape[2] == width
        if not fits or not 1 <= prompts.shape[0] <= most or prompts.shape[1] > tokens:
            raise WireError(
                f"{kind} is {_shape(prompts)}; allowed: 1 to {most} prompts, 0 to {tokens} tokens, "
                f"width {width}"
            )
        if of.shape != request.rows.shape:
            raise WireError(f"{kind}_of is {_shape(of)}; it must be ({count},), as rows is")
        if int(of.min()) < 0 or int(of.max()) >= len(prompts):
            raise WireError(f"{kind}_of must be in 0 to {len(prompts) - 1}")
        if not bool(torch.isfinite(prompts).all()):
            raise WireError(f"{kind} has values that are not finite in float32")
    if int(request.rows.min()) < 0:
        raise WireError("rows must be indices of points, from 0 on")
    return request


def read_points(body: bytearray, shape: Shape, channels: int) -> Tensor:
    """Parse and validate pixels: uint8 (N, H, W) or (N, H, W, channels)."""
    pixels = decode(body, {"pixels": torch.uint8})[0]["pixels"]
    fits = pixels.ndim in (3, 4) and pixels.shape[3:] in ((), (channels,), (1,))
    if not fits or not 1 <= len(pixels) <= shape.points:
        raise WireError(
            f"pixels is {_shape(pixels)}; allowed: (N, H, W) or (N, H, W, {channels}), "
            f"N from 1 to {shape.points}"
        )
    if not all(1 <= side <= 4096 for side in pixels.shape[1:3]):
        raise WireError(f"pixels is {_shape(pixels)}; sides of 1 to 4096 are allowed")
    return pixels


def _from_tensors(body: bytearray) -> ScoreRequest:
    tensors, metadata = decode(body, SCORE)
    points = metadata.get("points", "")
    if not DIGEST.fullmatch(points):
        raise WireError("the metadata needs points: the digest, 64 hexadecimal digits")
    return ScoreRequest(points, **tensors)


def _from_json(body: bytearray, shape: Shape) -> ScoreRequest:
    # Counted before parsing: [[0]] has few bytes of JSON, and a hundred times as many as Python
    # objects.
    if sum(body.count(mark) for mark in b",[{") > ELEMENTS:
        raise WireError(f"the JSON body has more than {ELEMENTS} values; {INSTEAD}", 413)
    try:
        found = from_json(bytes(body))
    except ValueError as error:  # also if nested too deeply
        raise WireError(f"the body is not JSON: {error}", 400) from None
    if not isinstance(found, dict) or found.keys() != ScoreBody.model_fields.keys():
        needed = ", ".join(ScoreBody.model_fields)
        raise WireError(f"the JSON body must be an object with {needed}, and nothing else")
    try:
        given = ScoreBody.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise WireError(f"the JSON body does not fit: {where}: {first['msg']}") from None
    return ScoreRequest(
        given.points,
        torch.tensor(given.rows),
        _prompts("text", given.text, shape.text_width),
        torch.tensor(given.text_of),
        _prompts("image", given.image, shape.image_width),
        torch.tensor(given.image_of),
    )


def _prompts(name: str, values: list[list[list[float]]], width: int) -> Tensor:
    tokens = len(values[0])
    if any(len(p) != tokens or any(len(token) != width for token in p) for p in values):
        raise WireError(f"{name} must have equally many tokens of width {width} in every prompt")
    return torch.tensor(values, dtype=torch.float64).reshape(len(values), tokens, width).float()


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def answer_json(logits: Tensor, cost: RequestCost, replayed: bool) -> dict[str, Any]:
    """The JSON form of an answer; its numbers round-trip exactly."""
    return {"logits": logits.tolist(), **vars(cost), "replayed": replayed}
