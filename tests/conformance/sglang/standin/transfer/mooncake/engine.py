"""Mooncake's `TransferEngine` as SGLang uses it, over a local socket instead of RDMA: it writes a peer's memory.

All of SGLang's mooncake backend runs above it as it is: bootstrap server, handshakes, transfer workers, status messages.
Each process listens at a port of its own, writes what it is sent where it is told to, if that lies within memory that
it has registered, and says so; the sender waits for that. `TRANSFER_FAULT` is a fault and the number of the KV write
that it befalls, such as `flip:3`.
"""

import ctypes
import os
import socket
import struct
import threading
import time
from typing import Final

WRITE: Final = struct.Struct("<QQ")  # address, bytes; bytes follow
DONE, REFUSED = b"\0", b"\1"
# A request's metadata is written in small pieces before its KV ends: told from KV by their size.
SMALLEST_KV: Final = 128
PATIENCE_S: Final = 0.7

# fault -> what it does to a write
FAULTS: Final = {
    "flip": "a bit of its first byte is flipped on the way",
    "skip": "its first page is not written, and said to be",
    "late": "it is said to be done, and done later",
    "slow": "it takes long; no fault",
    "fail": "it fails",
}


class TransferEngine:
    """Writes into the memory of other processes that have one, too."""

    def __init__(self) -> None:
        self._registered: dict[int, int] = {}
        self._peers: dict[str, socket.socket] = {}
        self._lock = threading.Lock()
        self._fault, _, number = os.environ.get("TRANSFER_FAULT", "").partition(":")
        self._faulty = int(number or 0)
        self._writes = 0

    def initialize(self, _hostname: str, _metadata: str, _protocol: str, _device: str) -> int:
        """Begin to listen."""
        self._socket = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._listen, daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        """The port at which others reach this process."""
        return int(self._socket.getsockname()[1])

    def register_memory(self, address: int, length: int) -> int:
        """Let others write there."""
        self._registered[address] = length
        return 0

    def unregister_memory(self, address: int) -> int:
        """Let nobody write there any more."""
        return 0 if self._registered.pop(address, None) is not None else -1

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        """As `register_memory`."""
        self._registered.update(zip(addresses, lengths, strict=True))
        return 0

    def batch_unregister_memory(self, addresses: list[int]) -> int:
        """As `unregister_memory`."""
        return min([self.unregister_memory(address) for address in addresses], default=0)

    def send_probe(self, _session_id: str) -> int:
        """Say that a peer is there."""
        return 0

    def transfer_sync_write(self, session_id: str, address: int, peer_address: int, length: int) -> int:
        """As `batch_transfer_sync_write`, of one piece."""
        return self.batch_transfer_sync_write(session_id, [address], [peer_address], [length])

    def batch_transfer_sync_write(
        self, session_id: str, addresses: list[int], peer_addresses: list[int], lengths: list[int]
    ) -> int:
        """Write each piece of this process's memory to its place in the peer's; 0, or -1 where that failed."""
        pieces = list(zip(addresses, peer_addresses, lengths, strict=True))
        with self._lock:
            fault = self._befalls(lengths)
        if fault == "fail":
            return -1
        if fault == "slow":
            time.sleep(PATIENCE_S)
        if fault == "late":
            threading.Thread(target=self._write, args=(session_id, pieces, fault), daemon=True).start()
            return 0
        return self._write(session_id, pieces, fault)

    def _befalls(self, lengths: list[int]) -> str:
        if not lengths or min(lengths) < SMALLEST_KV:
            return ""
        self._writes += 1
        if self._writes != self._faulty:
            return ""
        print(f"\ninjected {self._fault} in KV write {self._writes}", flush=True)
        return self._fault

    def _write(self, session_id: str, pieces: list[tuple[int, int, int]], fault: str) -> int:
        if fault == "late":
            time.sleep(PATIENCE_S)
        with self._lock:
            if session_id not in self._peers:
                port = int(session_id.rpartition(":")[2])
                self._peers[session_id] = socket.create_connection(("127.0.0.1", port))
            peer = self._peers[session_id]
            for number, (address, peer_address, length) in enumerate(pieces):
                content = bytearray(ctypes.string_at(address, length))
                if not number and fault == "skip":
                    continue
                if not number and fault == "flip":
                    content[0] ^= 0x10
                peer.sendall(WRITE.pack(peer_address, length) + content)
                if peer.recv(1) != DONE:
                    return -1
        return 0

    def _listen(self) -> None:
        while True:
            peer, _ = self._socket.accept()
            threading.Thread(target=self._write_for, args=(peer,), daemon=True).start()

    def _write_for(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as stream:
            while head := stream.read(WRITE.size):
                address, length = WRITE.unpack(head)
                content = stream.read(length)
                regions = self._registered.items()
                inside = any(start <= address and address + length <= start + size for start, size in regions)
                if inside:
                    ctypes.memmove(address, content, length)
                peer.sendall(DONE if inside else REFUSED)
