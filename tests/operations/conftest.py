"""No alert of a test leaves it."""

import pytest
from operations.alert_settings import NAMES


@pytest.fixture(autouse=True)
def _no_alert_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
