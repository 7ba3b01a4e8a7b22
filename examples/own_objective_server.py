"""A black box over HTTP without torch: heating of a house, simulated in steps of 15 minutes.

POST / with {"parameters": [[..4 numbers..], ..], "points": [day, ..]} returns {"losses": [..]}: the
cost of heating on each of 12 days with that controller, including cold hours and wear. The heater
switches on and off, and an hour is cold or not, so there is no useful derivative.

A response is stored under the request's Idempotency-Key, and a repeat is free. Every tenth response
is dropped, to simulate a network failure. GET / returns the number of computed rows.
"""

import json
import math
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from threading import Lock

DAYS = 12
kept: dict[str, bytes] = {}
computed = 0
lock, requests = Lock(), count(1)


def cost_of_a_day(controller: list[float], day: int) -> float:
    by_day, by_night = 20 + 2 * controller[0], 17 + 2 * controller[1]  # degrees
    slack = 0.1 + abs(controller[2])
    begin = 7 + 2 * controller[3]  # hour at which the day starts
    inside, heating, cost = 17.0, False, 0.0
    for quarter in range(96):
        hour = quarter / 4
        outside = 6 * math.sin(day) + 3 * math.sin((hour - 9) / 24 * 2 * math.pi)
        target = by_day if begin <= hour < 22 else by_night
        before, heating = heating, inside < target + (slack if heating else -slack)
        inside += ((outside - inside) / 30 + 1.5 * heating) / 4
        cost += 0.1 * heating + 0.1 * (heating != before)  # fuel, wear
        cost += 1.0 * (7 <= hour < 22 and inside < 20)  # somebody is cold
    return cost


class Handler(BaseHTTPRequestHandler):
    """Requests and responses in JSON."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet

    def do_POST(self) -> None:
        global computed
        key = self.headers["Idempotency-Key"]
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
            if key not in kept:
                rows = list(zip(asked["parameters"], asked["points"], strict=True))
                losses = [cost_of_a_day(controller, day) for controller, day in rows]
                kept[key] = json.dumps({"losses": losses}).encode()
                computed += len(rows)
            lost = next(requests) % 10 == 0
        self.reply(503, b"{}") if lost else self.reply(200, kept[key])

    def do_GET(self) -> None:
        self.reply(200, json.dumps({"days": DAYS, "computed": computed}).encode())

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Do not log."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if sys.argv[1:] else 8765), Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
