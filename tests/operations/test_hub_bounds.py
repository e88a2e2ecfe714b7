"""Tests that answers of the Hub have a bound of bytes and of time."""

import pytest
from operations.hub_fixtures import REPO, hub  # noqa: F401
from operations.hub_server import HubServer

from megatron.base.errors import OperationsError
from megatron.extras.operations.hub import answers
from megatron.extras.operations.hub.client import Hub


@pytest.fixture
def client(hub: HubServer) -> Hub:  # noqa: F811
    return Hub(REPO, timeout_seconds=5.0, log=print)


def test_a_listing_has_a_bound_of_bytes(client: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    head = client.head()
    monkeypatch.setattr(answers, "CALL_BYTES", 2000)
    # Each call counts from 0.
    for _ in range(5):
        client.head()
    monkeypatch.setattr(answers, "CALL_BYTES", 1100)
    with pytest.raises(OperationsError, match=rf"{REPO} on .*: the server sends more than 1,100"):
        client.list_files(head)


def test_pages_without_content_have_a_bound(client: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "CALL_BYTES", 1000)
    with pytest.raises(OperationsError, match="sends more than 1,000 bytes"):
        client.head()


def test_an_answer_has_a_bound_of_time(client: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "REQUEST_SECONDS", -1.0)
    with pytest.raises(OperationsError, match="the server sends for more than"):
        client.head()
