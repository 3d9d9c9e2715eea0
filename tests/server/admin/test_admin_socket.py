"""The file of the administrators' socket: whose it is, and what is there already."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from headrace.server.admin.admin_socket import SocketError, listen_on


def test_what_a_dead_server_has_left_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listen_on(path), pytest.raises(SocketError, match="another server"):
        listen_on(path)
    assert path.is_socket()  # nobody listens on it any more
    with listen_on(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    assert [each.name for each in tmp_path.iterdir()] == ["s"]


def test_a_file_that_is_no_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(SocketError, match="not a socket"):
        listen_on(path)
    assert path.read_text() == "mine"


def test_a_folder_that_is_not_there_and_a_path_that_is_too_long_are_said(tmp_path: Path) -> None:
    with pytest.raises(SocketError, match="cannot listen on"):
        listen_on(tmp_path / "nowhere" / "s")
    with pytest.raises(SocketError, match="cannot listen on"):
        listen_on(tmp_path / ("s" * 120))
    assert list(tmp_path.iterdir()) == []
