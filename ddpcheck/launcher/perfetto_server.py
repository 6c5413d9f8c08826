"""Serves one timeline on loopback, with a page that hands it to Perfetto by Perfetto's postMessage protocol."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

HOST = "127.0.0.1"
_CHUNK = 1 << 16

# Perfetto answers PONG once it can receive a trace. A browser may block the window until the reader clicks.
_SCRIPT = """
const { perfetto, title } = JSON.parse(document.getElementById("settings").textContent);
const target = new URL(perfetto);
const say = (text) => (document.getElementById("state").textContent = text);
const show = async () => {
  const trace = fetch("trace").then((answer) => {
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    return answer.arrayBuffer();
  });
  const view = window.open(perfetto);
  if (!view) return say("Your browser has blocked the window: press the button.");
  say("Waiting for Perfetto to load.");
  const ping = setInterval(() => view.postMessage("PING", target.origin), 100);
  addEventListener("message", async function answered(event) {
    if (event.origin !== target.origin || event.source !== view || event.data !== "PONG") return;
    removeEventListener("message", answered);
    clearInterval(ping);
    try {
      const buffer = await trace;
      view.postMessage({ perfetto: { buffer, title, keepApiOpen: false } }, target.origin, [buffer]);
      say("Perfetto shows the timeline. It stays in your browser: nothing was sent to a server.");
    } catch (error) {
      say(`The timeline could not be read from ddpcheck: ${error.message}. Is ddpcheck view still running?`);
    }
  });
};
document.getElementById("open").addEventListener("click", show);
show();
"""
_STYLE = (
    "body { font: 16px/1.5 system-ui, sans-serif; margin: 3rem auto; max-width: 40rem; padding: 0 1rem; }"
)


@dataclass(frozen=True)
class PerfettoServer:
    """A running server; `url` contains a secret, because other users of the machine reach loopback too."""

    url: str
    port: int


@contextmanager
def serve_timeline(timeline: Path, title: str, perfetto: str, port: int = 0) -> Iterator[PerfettoServer]:
    """Serve `timeline` until the block ends; port 0 takes a free one."""
    secret = secrets.token_urlsafe(16)
    server = ThreadingHTTPServer((HOST, port), _handler(secret, timeline, _page(title, perfetto)))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="ddpcheck-perfetto", daemon=True)
    thread.start()
    try:
        chosen = int(server.server_address[1])
        yield PerfettoServer(f"http://{HOST}:{chosen}/{secret}/", chosen)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def is_address(perfetto: str) -> bool:
    """Whether this can be the address of a Perfetto."""
    parts = urlsplit(perfetto)
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _page(title: str, perfetto: str) -> bytes:
    settings = json.dumps({"perfetto": perfetto, "title": title}).replace("<", "\\u003c")
    name = html.escape(title)
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{name} - ddpcheck</title>'
        f"<style>{_STYLE}</style></head><body><h1>{name}</h1>"
        f'<p id="state" role="status"></p><p><button id="open" type="button">Open in Perfetto</button></p>'
        f"<p>Perfetto: {html.escape(perfetto)}</p>"
        f'<script type="application/json" id="settings">{settings}</script>'
        f"<script>{_SCRIPT}</script></body></html>"
    ).encode()


def _policy() -> str:
    script, style = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (_SCRIPT, _STYLE)
    )
    return f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; connect-src 'self'"


def _handler(secret: str, timeline: Path, page: bytes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers for two addresses, to programs of this machine only."""

        server_version = "ddpcheck"
        sys_version = ""

        def do_GET(self) -> None:
            # A page elsewhere whose name leads to this machine has another host name.
            host = self.headers.get("Host", "").rpartition(":")[0]
            if host not in (HOST, "localhost"):
                self.send_error(403)
            elif self.path == f"/{secret}/":
                self._send("text/html; charset=utf-8", len(page), [page])
            elif self.path == f"/{secret}/trace":
                self._send_timeline()
            else:
                self.send_error(404)

        def _send_timeline(self) -> None:
            try:
                with timeline.open("rb") as file:
                    size = timeline.stat().st_size
                    self._send("application/octet-stream", size, iter(lambda: file.read(_CHUNK), b""))
            except OSError:
                self.send_error(404)

        def _send(self, kind: str, size: int, parts: Iterator[bytes] | list[bytes]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(size))
            self.send_header("Content-Security-Policy", _policy())
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            for part in parts:
                self.wfile.write(part)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not logged."""

    return Handler
