"""A proxy that spoils answers by seed, `python -m tests.support.faulty_proxy PORT SEED SHARE`.

It passes requests on to a service on this machine and does to each, by chance, one of `FAULTS` or
nothing. Faults before the service is asked cost nothing; those after it leave an answer in the
ledger that the client never saw, so that only a replay is not paid twice. On one line of standard
output it prints its port; on the end of standard input it prints how often it did what.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter

FAULTS = ("500", "502", "429", "cut", "slow", "text", "json", "noise", "hang up", "swapped")
STORM = 6  # requests that are sent away in a row


async def message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of a request or answer that has a Content-Length or no body."""
    head = await reader.readuntil(b"\r\n\r\n")
    size = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            size = int(line.split(b":")[1])
    return head, await reader.readexactly(size)


def plain(status: str, body: bytes = b"broken", extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nContent-Type: text/plain\r\n"
    return f"{head}{extra}\r\n".encode() + body


class Proxy:
    def __init__(self, port: int, seed: int, share: float) -> None:
        self.port, self.share = port, share  # of requests that are spoilt
        self.chance = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.storm = 0
        self.last = b""

    def fault(self) -> str:
        if self.storm:
            self.storm -= 1
            return "429"
        fault = self.chance.choice(FAULTS) if self.chance.random() < self.share else "none"
        if fault == "429":
            self.storm = STORM - 1
        return fault

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head, body = await message(reader)
                fault = self.fault()
                self.done[fault] += 1
                answer = await self.answer(fault, head, body)
                writer.write(answer)
                await writer.drain()
                if fault in ("cut", "hang up"):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, fault: str, head: bytes, body: bytes) -> bytes:
        if fault == "500":
            return plain("500 Internal Server Error")
        if fault == "502":
            return plain("502 Bad Gateway", b"<html>")
        if fault == "429":
            return plain("429 Too Many Requests", b"{}", "Retry-After: 1\r\n")
        got, content = await self.ask(head, body)  # from here on it is paid for
        if fault == "slow":
            await asyncio.sleep(2.5)
        if fault == "hang up":
            return b""
        if fault == "cut":
            return got + content[: len(content) // 2]
        if fault == "text":
            return plain("200 OK", b"all is well")
        if fault == "json":
            return plain("200 OK", b'{"logits": [[1.0]]}')
        if fault == "noise":  # right headers and length, other bits
            spoilt = bytes(byte ^ 1 for byte in content[-8:])
            return got + content[:-8] + spoilt
        if fault == "swapped":  # the answer to somebody else
            self.last, answer = got + content, self.last or got + content
            return answer
        return got + content

    async def ask(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head + body)
        await writer.drain()
        answer = await message(reader)
        writer.close()
        return answer


async def main(port: int, seed: int, share: float) -> None:
    proxy = Proxy(port, seed, share)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=2**24)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(json.dumps(proxy.done), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
