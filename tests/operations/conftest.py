"""Settings of the environment that every test here runs without."""

import pytest
from operations.alert_settings import NAMES


@pytest.fixture(autouse=True)
def _no_alert_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
