"""Sequences in llama.cpp: a shared prefix, a row's own tokens, vectors, tokens, for many rows.

Keys and values of the prefix are computed once and copied to every sequence; after a pass they are
all that remains. Rows with the same tokens before the vectors share those of them, too. Keys and
values are stored in float32: in llama.cpp's default, float16, small noise would be rounded away.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flops.errors import FlopsError
from flops.optional import require

MOST_ROWS = 256  # sequences of a context of llama.cpp
_ERROR = 3  # level of its log
_F32 = 0  # its type of tensors
_PAGE = 256  # positions of a sequence are a multiple of this
_PIECE = 512  # tokens that are computed at once: logits of all of them take memory

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


class LlamaCppError(FlopsError):
    """llama.cpp cannot load or run a model."""


class LlamaContext:
    """A GGUF model with the keys and values of its sequences; closed when it is collected.

    Args:
        path: A GGUF file.
        prefix: Tokens at the beginning of every sequence.
        rows: Sequences that are run at once.

    Attributes:
        width: Size of an input embedding.
        vocabulary: Number of tokens.

    Raises:
        MissingPackageError: llama-cpp-python is not installed.
        FileNotFoundError: There is no such file.
        LlamaCppError: llama.cpp cannot load it.
    """

    def __init__(self, path: Path, prefix: Sequence[int], rows: int) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}: give a GGUF file")
        self._api: Any = require("llama_cpp", "llama-cpp")
        self.rows, self._prefix = rows, tuple(prefix)
        self._lock = threading.Lock()
        self._context: Any = None
        self._close: Callable[[], Any] = int  # nothing to close yet
        with _Log(self._api) as log:
            settings = self._api.llama_model_default_params()
            self._model = self._api.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise LlamaCppError(f"llama.cpp cannot load {path}{log}")
        weakref.finalize(self, self._api.llama_model_free, self._model)
        self.width = int(self._api.llama_model_n_embd(self._model))
        vocabulary = self._api.llama_model_get_vocab(self._model)
        self.vocabulary = int(self._api.llama_vocab_n_tokens(vocabulary))
        unknown = [t for t in self._prefix if not 0 <= t < self.vocabulary]
        if unknown:
            raise LlamaCppError(f"the model has {self.vocabulary} tokens, the prefix {unknown}")
        self._room = (0, 0)

    def run(
        self,
        before: Sequence[tuple[int, ...]],
        embeddings: Floats,
        tokens: Tokens,
        wanted: Mask,
        threads: int,
    ) -> Floats:
        """Next-token logits where wanted, in the order of the rows, (count, vocabulary).

        Args:
            before: Tokens of each row between prefix and embeddings, B of them.
            embeddings: (B, N, width), with B at most `rows` and N at least 1.
            tokens: (B, T).
            wanted: After the embeddings and after each token, (B, 1 + T); at least one.
            threads: Threads of llama.cpp.

        Raises:
            LlamaCppError: The run fails.
        """
        rows, vectors = embeddings.shape[:2]
        length = int(np.flatnonzero(wanted.any(0))[-1])  # later tokens do not matter
        first, rest = wanted[:, :1], wanted[:, 1 : 1 + length]
        found = np.empty((int(wanted.sum()), self.vocabulary), dtype=np.float32)
        places = wanted.ravel().cumsum().reshape(wanted.shape) - 1
        starts = len(self._prefix) + np.array([len(text) for text in before], dtype=np.int32)
        texts = {text: row for row, text in reversed(list(enumerate(before)))}  # first row of each
        most = max(rows * max(vectors, length), sum(map(len, texts)))
        with self._lock, _Log(self._api) as self._log:
            self._reserve(int(starts.max()) + vectors + length, most, threads)
            try:
                self._read_texts(before, texts)
                marks = np.zeros((rows, vectors), dtype=bool)
                marks[:, -1:] = first
                self._decode(_Places.of(starts, vectors), marks, embeddings=embeddings)
                self._read(found, places[:, :1][first])
                if length:
                    after = _Places.of(starts + vectors, length)
                    self._decode(after, rest, tokens=tokens[:, :length])
                    self._read(found, places[:, 1 : 1 + length][rest])
            finally:
                self._forget(rows)
        return found

    def _read_texts(
        self, before: Sequence[tuple[int, ...]], texts: dict[tuple[int, ...], int]
    ) -> None:
        """Keys and values of the rows' own tokens: computed in the first row that has them."""
        parts = [_Places.of(np.array([len(self._prefix)]), len(t), row) for t, row in texts.items()]
        tokens = np.array([token for text in texts for token in text], dtype=np.int32)
        if not len(tokens):
            return
        self._decode(_Places.join(parts), np.zeros(len(tokens), dtype=bool), tokens=tokens)
        for row, text in enumerate(before):
            if texts[text] != row:
                self._api.llama_memory_seq_rm(self._memory, row, -1, -1)
                self._api.llama_memory_seq_cp(self._memory, texts[text], row, -1, -1)

    def _reserve(self, positions: int, batch: int, threads: int) -> None:
        """Make room for sequences and batches of this length, with the prefix in all sequences."""
        if positions > self._room[0] or batch > self._room[1]:
            positions = max(-(-positions // _PAGE) * _PAGE, self._room[0])
            self._open(positions, max(batch, len(self._prefix), self._room[1]), threads)
        self._api.llama_set_n_threads(self._context, threads, threads)

    def _open(self, positions: int, batch: int, threads: int) -> None:
        self._close()  # before the next one is made: memory
        api, self._context = self._api, None
        self._room = (0, 0)
        settings = api.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = positions * self.rows, self.rows
        settings.n_batch, settings.n_ubatch = batch, min(batch, _PIECE)
        settings.n_threads = settings.n_threads_batch = threads
        settings.type_k = settings.type_v = _F32
        settings.flash_attn_type = 0  # rounds to float16
        settings.no_perf = True
        self._context = api.llama_init_from_model(self._model, settings)
        if not self._context:
            raise LlamaCppError(
                f"llama.cpp has no room for {self.rows} sequences of {positions} tokens"
                f"{self._log}; choose fewer rows"
            )
        self._close = weakref.finalize(self, _free, api, self._context)
        self._memory = api.llama_get_memory(self._context)
        if self._prefix:
            tokens = np.array(self._prefix, dtype=np.int32)
            places = _Places.of(np.zeros(1, dtype=np.int32), len(tokens))
            self._decode(places, np.zeros(len(tokens), dtype=bool), tokens=tokens)
            for row in range(1, self.rows):
                api.llama_memory_seq_cp(self._memory, 0, row, -1, -1)
        self._room = positions, batch

    def _decode(
        self,
        places: _Places,
        marks: Mask,
        *,
        tokens: Tokens | None = None,
        embeddings: Floats | None = None,
    ) -> None:
        """Append vectors or tokens to their sequences, with logits where marked."""
        count = len(places.rows)
        positions = np.ascontiguousarray(places.positions, dtype=np.int32)
        ones, owners = np.ones(count, dtype=np.int32), np.arange(self.rows, dtype=np.int32)
        own = (owners.ctypes.data + 4 * places.rows.astype(np.uintp)).astype(np.uintp)
        wanted = marks.ravel().astype(np.int8)
        batch = self._api.llama_batch()
        batch.n_tokens = count
        kept: list[Any] = [positions, ones, own, wanted]
        if tokens is not None:
            kept.append(np.ascontiguousarray(tokens, dtype=np.int32))
            batch.token = _pointer(kept[-1], ctypes.c_int32)
        if embeddings is not None:
            kept.append(np.ascontiguousarray(embeddings, dtype=np.float32))
            batch.embd = _pointer(kept[-1], ctypes.c_float)
        batch.pos = _pointer(positions, ctypes.c_int32)
        batch.n_seq_id = _pointer(ones, ctypes.c_int32)
        batch.seq_id = ctypes.cast(own.ctypes.data, type(batch.seq_id))
        batch.logits = _pointer(wanted, ctypes.c_int8)
        code = self._api.llama_decode(self._context, batch)
        if code:
            raise LlamaCppError(
                f"llama.cpp could not run {count} tokens or vectors (code {code}){self._log}"
            )

    def _read(self, found: Floats, places: npt.NDArray[np.int64]) -> None:
        """Copy the logits of the last pass to their places."""
        if len(places):
            pointer = self._api.llama_get_logits(self._context)
            found[places] = np.ctypeslib.as_array(pointer, shape=(len(places), self.vocabulary))

    def _forget(self, rows: int) -> None:
        """Remove all but the prefix from the first sequences."""
        if self._context:
            for row in range(rows):
                self._api.llama_memory_seq_rm(self._memory, row, len(self._prefix), -1)


@dataclass(frozen=True)
class _Places:
    """Row and position of each token of a pass."""

    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]

    @classmethod
    def of(cls, starts: npt.NDArray[Any], length: int, first: int = 0) -> _Places:
        """So many tokens from each row's start; the first of these rows has this number."""
        rows = np.repeat(first + np.arange(len(starts)), length)
        return cls(rows, (starts[:, None] + np.arange(length)).ravel())

    @classmethod
    def join(cls, parts: Sequence[_Places]) -> _Places:
        """Several, in this order."""
        rows = np.concatenate([part.rows for part in parts])
        return cls(rows, np.concatenate([part.positions for part in parts]))


class _Log:
    """Keeps errors of llama.cpp's log, which else goes to the standard error output."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._said: list[str] = []

    def __enter__(self) -> _Log:
        def keep(level: int, text: bytes, data: object) -> None:
            if level == _ERROR:
                self._said.append(text.decode(errors="replace").strip())

        self._callback = self._api.llama_log_callback(keep)
        before, data = self._api.llama_log_callback(), ctypes.c_void_p()
        self._api.llama_log_get(ctypes.byref(before), ctypes.byref(data))
        self._before = before, data
        self._api.llama_log_set(self._callback, None)
        return self

    def __exit__(self, *error: object) -> None:
        self._api.llama_log_set(*self._before)

    def __str__(self) -> str:
        return f": {self._said[0]}" if self._said else ""


def _free(api: Any, context: Any) -> None:
    with _Log(api):
        api.llama_free(context)


def _pointer(array: npt.NDArray[Any], kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
