"""An HTTP server that batches requests: it runs those that wait together as one batch.

    gtco compile vit.onnx -o vit.so --dim batch=1..8
    python server.py vit.so --port 8000 --wait-ms 2
    curl --data-binary @image.npy http://127.0.0.1:8000/ -o logits.npy

A request's body is an .npy file of one sample, without the batch axis; the answer is the .npy file
of the first output. The model has one input and was compiled for a range or a list of batches.
Needs gtco and numpy alone.
"""

from __future__ import annotations

import argparse
import io
import queue
import threading
import time
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

import gtco

MOST_BYTES = 64 << 20  # of a request


class Batcher:
    """Collects samples that arrive within ``wait`` seconds and runs them as the least batch of the
    library that holds them. With a list of batches the rest of such a batch is zeros.
    """

    def __init__(self, library: str, wait: float):
        self.model = gtco.load(library)
        (self.input,) = self.model.inputs
        if len(self.model.dims) != 1:
            raise SystemExit(f"{library} has no range or list of batches: compile it with --dim")
        (sizes,) = self.model.dims.values()  # of one dimension, the batch
        self.batches, self.wait = sorted(sizes), wait
        self.waiting: queue.Queue[tuple[np.ndarray, Future[np.ndarray]]] = queue.Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    def submit(self, sample: np.ndarray) -> Future[np.ndarray]:
        """The sample's output, later. Raises ``ValueError`` if the model takes no such sample."""
        shape = tuple(self.input.shape[1:])
        if sample.dtype != self.input.dtype or sample.shape != shape:
            given = f"{sample.dtype}{list(sample.shape)}"
            raise ValueError(f"a sample is {self.input.dtype}{list(shape)}, not {given}")
        answer: Future[np.ndarray] = Future()
        self.waiting.put((sample, answer))
        return answer

    def _serve(self) -> None:
        while True:
            taken = [self.waiting.get()]
            until = time.monotonic() + self.wait
            while len(taken) < self.batches[-1]:
                try:
                    taken.append(self.waiting.get(timeout=max(0.0, until - time.monotonic())))
                except queue.Empty:
                    break
            self._run(taken)

    def _run(self, taken: list[tuple[np.ndarray, Future[np.ndarray]]]) -> None:
        batch = next(size for size in self.batches if size >= len(taken))
        x = np.zeros((batch, *self.input.shape[1:]), self.input.dtype)
        for row, (sample, _) in enumerate(taken):
            x[row] = sample
        try:
            y = next(iter(self.model.run({self.input.name: x}).values()))
        except Exception as error:  # the server goes on; the requests get the reason
            for _, answer in taken:
                answer.set_exception(error)
            return
        for row, (_, answer) in enumerate(taken):
            answer.set_result(y[row])


def handler(batcher: Batcher) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            try:
                length = int(self.headers.get("Content-Length", ""))
                if not 0 < length <= MOST_BYTES:
                    raise ValueError(f"a body of {length} bytes: give 1 to {MOST_BYTES}")
                body = io.BytesIO(self.rfile.read(length))
                answer = batcher.submit(np.lib.format.read_array(body, allow_pickle=False))
            except (ValueError, EOFError, OSError) as error:  # what is wrong with the request
                self.close_connection = True  # the rest of its body may be unread
                return self._reply(400, "text/plain", f"{error}\n".encode())
            try:
                file = io.BytesIO()
                np.save(file, answer.result())
            except Exception as error:
                return self._reply(500, "text/plain", f"{error}\n".encode())
            self._reply(200, "application/octet-stream", file.getvalue())

        def do_GET(self) -> None:
            """For a load balancer: the server is up and the model is loaded."""
            self._reply(200, "text/plain", b"ok\n")

        def _reply(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing for each request."""

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves a compiled model over HTTP.")
    parser.add_argument("library", help="compiled with --dim batch=1..8, or another range or list")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--wait-ms", type=float, default=2.0, help="for others to join a batch")
    given = parser.parse_args()
    batcher = Batcher(given.library, given.wait_ms / 1e3)
    with ThreadingHTTPServer((given.host, given.port), handler(batcher)) as server:
        print(f"listening on {given.host}:{server.server_port}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
