"""Files over FTP on loopback, by a server that knows no more than a client needs to read one."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any


class _Session(StreamRequestHandler):
    def __init__(self, *args: Any, folder: Path) -> None:
        self.folder = folder
        super().__init__(*args)

    def handle(self) -> None:
        listener, start = socket.create_server(("127.0.0.1", 0)), 0
        self.say("220 ready")
        with listener, suppress(ConnectionError):
            while line := self.rfile.readline().decode().strip():
                verb, _, text = line.partition(" ")
                path = self.folder / text.lstrip("/")
                if verb == "PASV":
                    port = listener.getsockname()[1]
                    self.say(f"227 (127,0,0,1,{port // 256},{port % 256})")
                elif verb == "REST":
                    start = int(text)
                    self.say("350 go on")
                elif verb == "SIZE" and path.is_file():
                    self.say(f"213 {path.stat().st_size}")
                elif verb == "RETR" and path.is_file():
                    self.send(listener, path.read_bytes()[start:])
                    start = 0
                elif verb == "MLSD" and path.is_dir():
                    self.send(listener, "".join(map(_fact, path.iterdir())).encode())
                else:
                    said = {"PASS": "230 in", "USER": "331 ?", "PWD": '257 "/"', "QUIT": "221 bye"}
                    known = {"TYPE", "CWD", "OPTS", "ABOR"}
                    self.say(said.get(verb, "200 ok" if verb in known else "550 no"))

    def say(self, line: str) -> None:
        self.wfile.write(f"{line}\r\n".encode())

    def send(self, listener: socket.socket, data: bytes) -> None:
        self.say("150 here it is")
        connection, _ = listener.accept()
        with connection, suppress(ConnectionError):
            connection.sendall(data)
        self.say("226 that is all")


def _fact(path: Path) -> str:
    kind = "dir" if path.is_dir() else "file"
    return f"type={kind};size={path.stat().st_size};modify=20260101000000; {path.name}\r\n"


@contextmanager
def serving_ftp(folder: Path) -> Iterator[str]:
    """The address of a folder, for as long as the context lasts."""
    handler: Any = partial(_Session, folder=folder)
    with ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ftp://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
