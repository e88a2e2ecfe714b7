"""A real mail server and a real web server on this machine, which keep the alerts they receive."""

import json
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, LoginPassword

USER = "operator"
PASSWORD = "correct horse"


@dataclass
class Mailbox:
    host: str
    port: int = 0
    messages: list[EmailMessage] = field(default_factory=list)
    refuse: frozenset[str] = frozenset()
    """Recipients that the server refuses."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def handle_RCPT(
        self, server: Any, session: Any, envelope: Any, address: str, options: Any
    ) -> str:
        if address in self.refuse:
            return "550 no such mailbox"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        message = message_from_bytes(envelope.content, policy=policy.default)
        assert isinstance(message, EmailMessage)
        self.messages.append(message)
        return "250 OK"


@contextmanager
def mail_server(
    *, certificate: Path | None = None, login: bool = False, host: str = "127.0.0.1", port: int = 0
) -> Iterator[Mailbox]:
    """Run a mail server.

    Args:
        certificate: Its certificate and key. The server offers STARTTLS if it has one.
        login: Accept mail only with USER and PASSWORD.
        host: Address to listen on.
        port: Port to listen on. 0: a free one.
    """
    mailbox = Mailbox(host)
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)

    def authenticate(
        server: Any, session: Any, envelope: Any, mechanism: str, data: Any
    ) -> AuthResult:
        good = data == LoginPassword(USER.encode(), PASSWORD.encode())
        return AuthResult(success=good, handled=False)

    options: dict[str, Any] = {}
    if login:
        options = {
            "authenticator": authenticate,
            "auth_required": True,
            "auth_require_tls": certificate is not None,
        }
    controller = Controller(
        mailbox, hostname=host, port=port or free_port(host), tls_context=context, **options
    )
    controller.start()
    mailbox.port = controller.port
    try:
        yield mailbox
    finally:
        controller.stop()


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def make_certificate(folder: Path, name: str = "127.0.0.1") -> Path:
    """Return a file with a self-signed certificate for an address, and its key."""
    path = folder / "certificate.pem"
    public = folder / "public.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test"
    subject = ["-addext", f"subjectAltName=IP:{name}"]
    files = ["-keyout", str(path), "-out", str(public)]
    subprocess.run([*command.split(), *subject, *files], check=True, capture_output=True)
    path.write_text(path.read_text() + public.read_text())
    return path


@dataclass
class Webhook:
    url: str = ""
    texts: list[str] = field(default_factory=list)
    status: int = 200


@contextmanager
def webhook_server() -> Iterator[Webhook]:
    hook = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if hook.status == 200:
                hook.texts.append(body["text"])
            self.send_response(hook.status)
            if hook.status in (301, 302):
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hook.url = f"http://127.0.0.1:{server.server_port}/services/T0/secret-token"
    try:
        yield hook
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
