"""Evaluations need no network."""

import socket

import pytest


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(self, address):
        raise AssertionError(f"an evaluation opened a connection to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
