"""Prompt tuning: a low-dimensional parametrisation of CLIP's prompt vectors (the paper's 5.2).

    p = z W,   z_T of shape (m_T, d_T), z_I of shape (m_I, d_I)

W are frozen Gaussian projections, one per modality, with entries of variance s^2/d, so that
z ~ N(0, 1) gives prompts on the scale of the embeddings around them: s is .02 for texts (CLIP's
initialisation of tokens) and .3 for images. Tuning starts from z ~ N(0, .3^2). (At z = 0 all image
prompts are equal, and LayerNorm is not differentiable there.) With ``single`` there is one vector
per modality, d_T + d_I parameters in total, and W maps it to all prompt vectors at once.

An objective maps z to prompts and requests logits; the loss is the cross-entropy, computed by the
client, which keeps the labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flops.blackbox.journal_records import Request, Response
from flops.blackbox.objective import Candidates
from flops.blackbox.outputs import Outputs
from flops.errors import FlopsError
from flops.perturb.random import generator
from flops.serve.client import KeyedScoreRequest, ServiceClient
from flops.tasks.models.clip import PromptedClip

EMBED = "embed"  # kind of candidates whose columns include the logits
STEPS = ("clean", "query")  # kinds whose columns include the logits if `shown`


@dataclass(frozen=True)
class PromptSpace:
    """Parametrisation of the prompts.

    Args:
        text_width: Width of a text prompt vector.
        image_width: Width of an image prompt vector.
        text_tokens: Text prompt vectors m_T.
        image_tokens: Image prompt vectors m_I.
        text_dimensions: d_T.
        image_dimensions: d_I.
        single: One z per modality instead of one per prompt vector.
        text_scale: s of the text prompts.
        image_scale: s of the image prompts.
        spread: Standard deviation of the initial z.
        seed: Seeds the projections and the initial z.
    """

    text_width: int
    image_width: int
    text_tokens: int = 12
    image_tokens: int = 10
    text_dimensions: int = 500
    image_dimensions: int = 500
    single: bool = False
    text_scale: float = 0.02
    image_scale: float = 0.3
    spread: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the sizes."""
        if min(self.text_tokens, self.image_tokens) < 0:
            raise FlopsError("text_tokens and image_tokens must not be negative")
        if min(self.text_dimensions, self.image_dimensions) < 1:
            raise FlopsError("text_dimensions and image_dimensions must be at least 1")

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """Shape of z, by modality."""
        found = {
            "text": (1 if self.single else self.text_tokens, self.text_dimensions),
            "image": (1 if self.single else self.image_tokens, self.image_dimensions),
        }
        tokens = {"text": self.text_tokens, "image": self.image_tokens}
        return {name: shape for name, shape in found.items() if tokens[name]}

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(rows * columns for rows, columns in self.parts.values())

    @cached_property
    def projections(self) -> dict[str, Tensor]:
        """W of each modality, shape (d, width), or (d, tokens * width) for single vectors."""
        found = {}
        for place, (name, (_, dimensions)) in enumerate(self.parts.items()):
            tokens, width = self._shape(name)
            source = generator(self.seed, 17, place)
            out = tokens * width if self.single else width
            scale = self.text_scale if name == "text" else self.image_scale
            matrix = torch.randn(dimensions, out, generator=source)
            found[name] = matrix * (scale / dimensions**0.5)
        return found

    def start(self) -> Tensor:
        """Initial parameters, shape (size,)."""
        return torch.randn(self.size, generator=generator(self.seed, 18)) * self.spread

    def prompts(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Text and image prompts, shapes (Q, m_T, text_width) and (Q, m_I, image_width)."""
        sizes = [rows * columns for rows, columns in self.parts.values()]
        cut = z.split(sizes, dim=1) if sizes else ()
        found = {}
        for part, (name, shape) in zip(cut, self.parts.items(), strict=True):
            projected = part.reshape(len(z), *shape) @ self.projections[name]
            found[name] = projected.reshape(len(z), *self._shape(name))
        return tuple(
            found.get(name, z.new_zeros(len(z), *self._shape(name))) for name in ("text", "image")
        )

    def _shape(self, name: str) -> tuple[int, int]:
        if name == "text":
            return self.text_tokens, self.text_width
        return self.image_tokens, self.image_width


def prompts_of(space: PromptSpace, parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct text and image prompts of rows, and the index of each row's prompt.

    A vector that all rows share (a clean pass, a shared draw) is one prompt: it is sent once, and
    the class texts are encoded once.
    """
    shared = len(parameters) > 1 and parameters.stride(0) == 0
    text, image = space.prompts(parameters[:1] if shared else parameters)
    of = torch.zeros(len(parameters), dtype=torch.long)
    return text, image, of if shared else torch.arange(len(parameters))


def columns(logits: Tensor, labels: Tensor, kind: str, shown: bool = False) -> Tensor:
    """Loss and correctness; with the logits for embeddings, or if ``shown``."""
    losses = F.cross_entropy(logits, labels, reduction="none")
    found = [losses, (logits.argmax(1) == labels).float()]
    whole = torch.stack(found, 1)
    wanted = kind == EMBED or (shown and kind in STEPS)
    return torch.cat([whole, logits], 1) if wanted else whole


def outputs_of(labels: Tensor) -> Outputs:
    """Centred logits in such columns; centring does not change the loss."""

    def centred(columns: Tensor) -> Tensor:
        logits = columns[:, 2:]
        return logits - logits.mean(1, keepdim=True)

    def loss(outputs: Tensor, points: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels[points], reduction="none")

    return Outputs(centred, loss)


@dataclass(frozen=True)
class Uploaded:
    """Points uploaded to a service, in sets of ``size`` (the last may be smaller)."""

    names: tuple[str, ...]
    size: int


def upload(client: ServiceClient, pixels: Tensor, limits: Mapping[str, Any]) -> Uploaded:
    """Upload points, in sets within the service's limits."""
    room = int(limits["upload_bytes"]) - 4096  # room for names and shapes
    size = min(room // max(1, pixels[0].numel()), int(limits["points"]), len(pixels))
    if size < 1:
        raise FlopsError(
            f"the service accepts uploads of {limits['upload_bytes']:,} bytes, less than one image"
        )
    return Uploaded(tuple(client.upload(part) for part in pixels.split(size)), size)


@dataclass(frozen=True, eq=False)
class ServiceObjective:
    """Evaluates candidates with a service; every request has an idempotency key.

    Attributes:
        client: Client of the service.
        points: The uploaded points.
        labels: Their classes, shape (N,).
        space: Maps z to prompts.
        shown: Whether the columns of steps include the logits, which the service always returns.
    """

    client: ServiceClient
    points: Uploaded
    labels: Tensor
    space: PromptSpace
    shown: bool = False

    def prepare(self, candidates: Candidates, key: str) -> list[Request]:
        """Serialize candidates: one request for each set of points among their rows."""
        text, image, of = prompts_of(self.space, candidates.parameters)
        found = []
        for number, at in self._sets(candidates):
            rows = candidates.points[at] - number * self.points.size
            one = key if len(at) == len(candidates) else f"{key}-{number}"
            # Only the prompts of these rows: an unused prompt would be charged.
            used, place = of[at].unique(return_inverse=True)
            request = KeyedScoreRequest(
                self.points.names[number], rows, text[used], place, image[used], place, one
            )
            found.append(Request(one, request.body()))
        return found

    def send(self, candidates: Candidates, requests: Sequence[Request]) -> Response:
        """Send serialized requests; return losses, correctness and cost."""
        logits: Tensor | None = None
        cost = {"texts": 0, "images": 0, "replays": 0}
        for (_, at), request in zip(self._sets(candidates), requests, strict=True):
            scores = self.client.send(_StoredRequest(request, candidates.points[at]))
            if logits is None:
                logits = scores.logits.new_empty(len(candidates), scores.logits.size(1))
            logits[at] = scores.logits
            for name in ("texts", "images"):
                cost[name] += int(getattr(scores, name))
            cost["replays"] += int(scores.replayed)
        assert logits is not None
        labels = self.labels[candidates.points]
        return Response(columns(logits, labels, candidates.kind, self.shown), cost)

    def evaluate(self, candidates: Candidates, key: str) -> Response:
        """Prepare and send."""
        return self.send(candidates, self.prepare(candidates, key))

    def _sets(self, candidates: Candidates) -> list[tuple[int, Tensor]]:
        """Sets of uploaded points and the rows of each."""
        sets = candidates.points // self.points.size
        return [(n, torch.nonzero(sets == n).flatten()) for n in sets.unique().tolist()]


class _StoredRequest(KeyedScoreRequest):
    """A request with stored bytes: serialized earlier, perhaps on another machine."""

    def __init__(self, request: Request, rows: Tensor) -> None:
        for name, value in (("key", request.key), ("rows", rows), ("_body", request.body)):
            object.__setattr__(self, name, value)

    def body(self) -> bytes:
        """The stored bytes."""
        body: bytes = vars(self)["_body"]
        return body


@dataclass(frozen=True, eq=False)
class LocalObjective:
    """The same objective on a local model, for backpropagation and tests."""

    model: PromptedClip
    images: Tensor  # (N, channels, S, S)
    labels: Tensor
    space: PromptSpace
    rows: int = 64
    shown: bool = False

    def logits(self, parameters: Tensor, points: Tensor) -> Tensor:
        """Logits of rows, differentiable in the parameters."""
        text, image, of = prompts_of(self.space, parameters)
        features = self.model.text_features(text)
        seen = self.model.image_features(self.images[points], image[of])
        return self.model.logits(seen, features[of])

    def losses(self, parameters: Tensor, points: Tensor) -> Tensor:
        """Losses of rows, differentiable, shape (Q,)."""
        logits = self.logits(parameters, points)
        return F.cross_entropy(logits, self.labels[points], reduction="none")

    def evaluate(self, candidates: Candidates, key: str) -> Response:
        """Losses, correctness and cost, computed in chunks."""
        found, texts = [], 0
        with torch.no_grad():
            for begin in range(0, len(candidates), self.rows):
                part = candidates.part(begin, begin + self.rows)
                logits = self.logits(part.parameters, part.points).clone()
                found.append(columns(logits, self.labels[part.points], part.kind, self.shown))
                shared = len(part) > 1 and part.parameters.stride(0) == 0
                texts += (1 if shared else len(part)) * len(self.model.classes)
        return Response(torch.cat(found).clone(), {"texts": texts, "images": len(candidates)})
