"""moto's server of S3 in a process of its own. Its first line of output is its port.

moto compares the condition of a write and writes in two steps, so two writers could both succeed.
A lock around each request makes them one step, as on a real store.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


def main() -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = DomainDispatcherApplication(create_backend_app)
    lock = threading.Lock()

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        # The body is read before, so that a slow client does not block the others.
        length = int(environ.get("CONTENT_LENGTH") or 0)
        if length:
            import io

            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
        with lock:
            return [b"".join(app(environ, start_response))]

    server = make_server("127.0.0.1", 0, serve, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
