"""Rank 0's server for processes that join an elastic run of processes that were started from outside."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.core.contracts.process import Address
from isotrain.core.launching.run_directory.run_directory import JOIN_FILE
from isotrain.core.transport.channel import Channel, finish
from isotrain.core.transport.encryption import EncryptionOffer
from isotrain.core.transport.server import AuthenticatedServer

_KEY_BYTES = 32
_REFUSED_SECONDS = 0.2
"""Time in which a process that is refused reads why."""


@dataclass(frozen=True)
class JoinAddress:
    """Address of the server, and the key to it.

    Attributes:
        host: Address of rank 0's host.
        port: Port there.
        key: Secret that connections must prove to have.
        rank: Number of the first process that may join.
    """

    host: str
    port: int
    key: bytes
    rank: int

    @classmethod
    def read(cls, run_directory: Path) -> JoinAddress:
        """The address that a run has written.

        Raises:
            OSError: The file cannot be read.
        """
        fields = json.loads((run_directory / JOIN_FILE).read_text(encoding="ascii"))
        return cls(**{**fields, "key": bytes.fromhex(fields["key"])})

    def write(self, run_directory: Path) -> None:
        """Writes the address into the run directory, for its owner alone."""
        text = json.dumps({**vars(self), "key": self.key.hex()})
        temporary = run_directory / f".{JOIN_FILE}-{secrets.token_hex(8)}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(text)
        temporary.replace(run_directory / JOIN_FILE)


class RemoteJoinRequest:
    """A process that asks to become a replica, at the other end of a connection.

    Attributes:
        host: Name of its host.
        address: Address of its host, and the port there that is reserved for it.
    """

    def __init__(self, channel: Channel, facts: Mapping[str, Any]) -> None:
        self.host = str(facts["host"])
        self.address: Address = (str(facts["address"]), int(facts["port"]))
        self._channel = channel
        self._is_taken = False

    def take_channel(self) -> Channel:
        """The connection, by which the process is a rank of the run from now on."""
        self._is_taken = True
        return self._channel

    def answer(self, fields: Mapping[str, Any]) -> None:
        """Sends an answer; does nothing if the process is gone."""
        self._channel.send({"do": "answer", "answer": dict(fields)})

    def close(self) -> None:
        """Ends the connection to a process that is refused."""
        if not self._is_taken:
            finish([self._channel], _REFUSED_SECONDS)


class JoinServer:
    """Receives the processes that ask to join; see `JoinRequests` of the launcher.

    A process that connects gets the description of the run. If it has the same plan, it asks to join.
    """

    def __init__(
        self,
        directory: Path,
        address: Address,
        rank: int,
        offer: EncryptionOffer,
        description: Mapping[str, Any],
    ) -> None:
        """Listens, and writes the address into the run directory.

        Args:
            directory: Run directory.
            address: Address to listen on, as other hosts reach it.
            rank: Number of the first process that may join.
            offer: Encryption offer of this process.
            description: What a process needs to know of the run to join it: JSON values.
        """
        key = secrets.token_bytes(_KEY_BYTES)
        self._directory = directory
        self._description = description
        self._server = AuthenticatedServer(address, key, offer=offer)
        self._described: list[Channel] = []
        """Connections of processes that have not asked yet."""
        JoinAddress(*address, key, rank).write(directory)

    def accept(self) -> list[RemoteJoinRequest]:
        """The requests since the last call, without waiting."""
        for _, connection in self._server.arrivals():
            channel = Channel(connection)
            channel.send({"run": self._description})
            self._described.append(channel)
        requests = []
        for channel in [*self._described]:
            messages = channel.read()
            if messages == []:
                continue
            self._described.remove(channel)
            try:
                message, _ = (messages or [])[0]
                requests.append(RemoteJoinRequest(channel, message["join"]))
            except (
                IndexError,
                KeyError,
                TypeError,
                ValueError,
            ):  # gone, or no message of this protocol
                channel.close()
        return requests

    def close(self) -> None:
        """Stops listening, and removes the address."""
        with contextlib.suppress(OSError):  # the run directory may have been removed
            (self._directory / JOIN_FILE).unlink()
        self._server.close()
        for channel in self._described:
            channel.close()
