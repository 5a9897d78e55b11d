"""Answers over HTTP from an exported text classifier, without drivetrain: python server.py model.onnx 8000."""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1])
about = json.loads(session.get_modelmeta().custom_metadata_map["drivetrain"])


def answer(texts: list[str]) -> list[str]:
    """The class of each text. A token is a byte plus 1: 0 is the padding, which the model masks itself."""
    rows = [[byte + 1 for byte in text.encode()[: about["shape"][0]]] for text in texts]
    tokens = numpy.full((len(rows), max(map(len, rows))), about["padding"], numpy.int64)
    for row, given in zip(tokens, rows, strict=True):
        row[: len(given)] = given
    return [about["classes"][best] for best in session.run(None, {"input": tokens})[0].argmax(1)]


class Server(BaseHTTPRequestHandler):
    """Takes a list of texts as JSON, and answers with a list of classes."""

    def do_POST(self) -> None:
        """Answer a request."""
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer(texts)).encode())


if __name__ == "__main__":
    HTTPServer(("127.0.0.1", int(sys.argv[2])), Server).serve_forever()
