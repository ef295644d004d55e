"""A server that answers everything with 500, or with what is no answer: `python bad_answers.py PORT 500|garbage`."""

import http.server
import sys
from typing import Any


class Bad(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = (500, b"") if sys.argv[2] == "500" else (200, b'{"series": [{"pool": "all"')
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


if __name__ == "__main__":
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Bad).serve_forever()
