"""`ddpcheck view --perfetto`: the page hands the timeline to a stand-in for Perfetto, in Chromium."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from ddpcheck.launcher.perfetto_server import serve_timeline
from tests.helpers.chromium import opened
from tests.helpers.commands import BIN, environment
from tests.helpers.profiled_run import profiled_run

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium")]

# What Perfetto does with messages: PONG for PING, then a trace.
STAND_IN = b"""<!DOCTYPE html><title>stand-in</title><script>
addEventListener("message", async (event) => {
  if (event.data === "PING") return event.source.postMessage("PONG", "*");
  if (!event.data.perfetto) return;
  const unzipped = new Response(event.data.perfetto.buffer).body.pipeThrough(new DecompressionStream("gzip"));
  const trace = JSON.parse(await new Response(unzipped).text());
  const body = JSON.stringify([event.data.perfetto.title, trace.traceEvents.length]);
  await fetch("/received", { method: "POST", body });
});
</script>"""


@pytest.fixture
def stand_in() -> Iterator[tuple[str, list[object], threading.Event]]:
    """The address of the stand-in, and what it received."""
    received: list[object] = []
    arrived = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(STAND_IN)

        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            arrived.set()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://localhost:{server.server_address[1]}", received, arrived
    server.shutdown()
    thread.join()
    server.server_close()


def test_perfetto_receives_the_timeline_of_all_ranks(
    tmp_path: Path, stand_in: tuple[str, list[object], threading.Event]
) -> None:
    address, received, arrived = stand_in
    run = profiled_run(tmp_path / "profiled")
    command = [BIN / "ddpcheck", "view", run, "--perfetto", "--perfetto-url", address]
    started = {**os.environ, **environment(), "DISPLAY": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=started) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+/[\w-]+/", line)
            assert found is not None, line
            with opened() as tab:
                tab.call("Page.navigate", url=found[0])
                while not tab.run("document.getElementById('state')?.textContent ?? ''"):
                    time.sleep(0.05)
                # A browser opens a window only for the reader.
                press = "document.getElementById('open').click()"
                tab.call("Runtime.evaluate", expression=press, userGesture=True)
                assert arrived.wait(120), tab.run("document.body.innerText")
                assert tab.errors() == []
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    [[title, events]] = received  # type: ignore[misc]
    assert title == "profiled"
    assert events > 0


def test_only_who_knows_the_address_gets_the_timeline(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json.gz"
    timeline.write_bytes(gzip.compress(b"{}"))
    with serve_timeline(timeline, "<b>run</b>", "http://localhost:1") as server:
        with urllib.request.urlopen(server.url) as answer:
            assert b"<b>run" not in answer.read()
        with urllib.request.urlopen(server.url + "trace") as answer:
            assert answer.read() == timeline.read_bytes()
        for url, host in ((f"http://127.0.0.1:{server.port}/trace", None), (server.url, "example.org:80")):
            request = urllib.request.Request(url, headers={"Host": host} if host else {})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request)
            assert refused.value.code in (403, 404)
            refused.value.close()
