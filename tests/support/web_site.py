"""Servers on this machine that stand in for the web."""

import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler], None]


class Site:
    """A server whose pages are functions; it keeps the paths that it was asked for."""

    def __init__(self) -> None:
        self.pages: dict[str, Answer] = {}
        self.asked: list[str] = []
        self.url = ""

    def has(self, path: str, content: bytes, media: str = "text/plain") -> str:
        """Serve bytes at a path; their URL."""
        self.pages[path] = lambda request: answer(request, content, media)
        return self.url + path


def answer(request: BaseHTTPRequestHandler, content: bytes, media: str = "text/plain", status: int = 200) -> None:
    """A plain answer."""
    request.send_response(status)
    request.send_header("Content-Type", media)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    request.wfile.write(content)


def redirect(request: BaseHTTPRequestHandler, to: str) -> None:
    """A redirect."""
    request.send_response(302)
    request.send_header("Location", to)
    request.send_header("Content-Length", "0")
    request.end_headers()


@contextmanager
def site(certificate: Path | None = None) -> Iterator[Site]:
    """A server that runs while the context lasts; by TLS with a certificate (which `certificate_of` makes)."""
    served = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.asked.append(self.path)
            path = self.path.partition("?")[0]
            page = served.pages.get(path)
            if page is None:
                answer(self, b"not here", status=404)
            else:
                page(self)

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: Any) -> None:  # a client that hangs up is what some tests are about
            pass

    server = Server(("127.0.0.1", 0), Handler)
    served.url = f"http{'s' if certificate else ''}://127.0.0.1:{server.server_port}"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def certificate_of_this_machine(file: Path) -> Path:
    """A self-made certificate of 127.0.0.1 with its key, in one file."""
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(file), "-out", f"{file}.crt"]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", "req", "-x509", *kind, *name], check=True, capture_output=True)
    file.write_text(file.read_text() + Path(f"{file}.crt").read_text())
    return file
