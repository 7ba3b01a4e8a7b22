"""Load test: many concurrent clients of a real service, compared with the model called directly.

64 clients send requests with new prompts for a minute, each as soon as it has its answer. The
throughput in rows is compared with that of the model called directly on the same kind of rows in
the same fixed batches, without HTTP, answer store or queue, interleaved in the same run. The model
has one torch thread in both; clients, sockets and disk need another core. By CPU time: CPU seconds
per row of the model over those of the service's process, which do not depend on other load.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.timing import ratios
from flops.serve.codec import BINARY, decode, digest, encode
from flops.serve.schema import ScoreRequest
from flops.tasks.data.fashion import fashion_shots
from flops.tasks.models.clip import PromptedClip

CLIENTS, SECONDS, ROWS, TOKENS = 64, 60.0, 16, 4
TURNS = 4  # service and model are interleaved, so that other load affects both
TEXT_BATCH, IMAGE_BATCH = 8, 32  # the defaults of `flops serve`


def body(points: str, model: PromptedClip, rows: int, source: torch.Generator) -> bytes:
    """A request with new prompts, so that no cache helps."""
    every = torch.arange(rows)

    def prompts(width: int) -> torch.Tensor:
        return 0.1 * torch.randn(rows, TOKENS, width, generator=source)

    points_of = torch.randint(0, 160, (rows,), generator=source)
    text, image = prompts(model.text_width), prompts(model.image_width)
    return ScoreRequest(points, points_of, text, every, image, every).body()


@torch.inference_mode()
def direct(model: PromptedClip, pixels: torch.Tensor, seconds: float) -> float:
    """Rows per second of the model in fixed batches."""
    images = model.prepare(pixels)
    source = torch.Generator().manual_seed(1)
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        text = 0.1 * torch.randn(IMAGE_BATCH, TOKENS, model.text_width, generator=source)
        image = 0.1 * torch.randn(IMAGE_BATCH, TOKENS, model.image_width, generator=source)
        rows = torch.randint(0, len(images), (IMAGE_BATCH,), generator=source)
        texts = torch.cat([model.text_features(part) for part in text.split(TEXT_BATCH)])
        model.logits(model.image_features(images[rows], image), texts)
        done += IMAGE_BATCH
    return done / (time.perf_counter() - started)


class Connection:
    """Minimal HTTP/1.1 client, so that clients are not the bottleneck."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def post(self, key: str, body: bytes) -> tuple[int, bytes, bytes]:
        """Status, headers and body of the response."""
        head = f"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Type: {BINARY}\r\n"
        head += f"Idempotency-Key: {key}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        size = int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(answer[9:12]), answer, await self._reader.readexactly(size)


async def load(
    port: int, make: list[Callable[[], bytes]], seconds: float, name: str
) -> tuple[Counter[str], list[float]]:
    """Run all clients; return responses by status, rows, and latencies."""
    seen: Counter[str] = Counter()
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        connection, turn = Connection(reader, writer), 0
        given = make[number]()
        while (started := time.perf_counter()) < end:
            status, head, content = await connection.post(f"{name}-{number}-{turn}", given)
            latencies.append(time.perf_counter() - started)
            seen[str(status)] += 1
            if status == 429:  # retry later
                after = head.partition(b"retry-after: ")[2].partition(b"\r\n")[0]
                await asyncio.sleep(float(after))
                continue
            if status == 200:
                logits = decode(bytearray(content), {"logits": torch.float32})[0]["logits"]
                seen["rows"] += len(logits)
            given, turn = make[number](), turn + 1
        writer.close()

    await asyncio.gather(*(client(number) for number in range(len(make))))
    return seen, latencies


def resident(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def processor_seconds(process: int) -> float:
    """CPU seconds of a process, over all cores."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def service(folder: str) -> Iterator[tuple[int, int]]:
    """A service of the bundled model: port and process."""
    command = [sys.executable, "-m", "flops", "serve", "--port", "0", "--json", "--rate", "0"]
    command += ["--threads", "1", "--ledger", f"{folder}/ledger.sqlite"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, encoding="utf-8", env=dict(os.environ, OMP_NUM_THREADS="1")
    )
    assert process.stdout is not None
    try:
        yield int(json.loads(process.stdout.readline())["url"].rsplit(":", 1)[1]), process.pid
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def measure(clients: int = CLIENTS, seconds: float = SECONDS, rows: int = ROWS) -> dict[str, Any]:
    """A service under load, interleaved with the model: throughput, ratio, errors and memory."""
    model, pixels = PromptedClip.load(), fashion_shots().train.pixels
    torch.set_num_threads(1)
    points = encode({"pixels": pixels})
    name = digest(points)
    sources = [torch.Generator().manual_seed(seed) for seed in range(clients)]
    make = [partial(body, name, model, rows, source) for source in sources]
    total: Counter[str] = Counter()
    latencies: list[float] = []
    served, alone, memory, work = [], [], [], [0.0, 0.0]
    with tempfile.TemporaryDirectory() as folder, service(folder) as (port, process):
        headers, url = {"Content-Type": BINARY}, f"http://127.0.0.1:{port}/v1"
        with httpx.Client(trust_env=False) as http:
            http.put(f"{url}/points/{name}", content=points, headers=headers).raise_for_status()
            warm, _ = asyncio.run(load(port, make[:4], min(2.0, seconds / 10), "warm"))
            direct(model, pixels, 0.2)
            for turn in range(TURNS):
                began, alone_began = time.process_time(), time.perf_counter()
                alone.append(direct(model, pixels, seconds / TURNS / 4))
                elapsed = time.perf_counter() - alone_began
                work[0] += (time.process_time() - began) / (alone[-1] * elapsed) / TURNS
                used, started = processor_seconds(process), time.perf_counter()
                seen, took = asyncio.run(load(port, make, seconds / TURNS, f"load-{turn}"))
                served.append(seen["rows"] / (time.perf_counter() - started))
                work[1] += (processor_seconds(process) - used) / seen["rows"] / TURNS
                total += seen
                latencies += took
                memory.append(resident(process))
            paid = http.get(f"{url}/usage").json()["queries"]
    cuts = statistics.quantiles(latencies, n=100)
    unanswered = paid - total["rows"] - warm["rows"]
    return {
        "rows/s": statistics.median(served),
        "directly": statistics.median(alone),
        "ratio": statistics.median(ratios(served, alone)),
        "ratio by CPU time": work[0] / work[1],
        "requests": total["200"],
        "rejected (429)": total["429"],
        "errors": sum(n for status, n in total.items() if status not in ("200", "429", "rows")),
        "charged, not received": unanswered,
        "ms, median": 1e3 * cuts[49],
        "ms, 99 %": 1e3 * cuts[98],
        "MB, first": memory[0],
        "MB, last": memory[-1],
    }


def run() -> dict[str, Any]:
    """One minute of load, and a third of it for smaller and larger requests."""
    return {
        f"{CLIENTS} clients, {ROWS} rows each": measure(),
        f"{CLIENTS} clients, 4 rows each": measure(seconds=SECONDS / 3, rows=4),
        f"{CLIENTS} clients, 64 rows each": measure(seconds=SECONDS / 3, rows=64),
    }
