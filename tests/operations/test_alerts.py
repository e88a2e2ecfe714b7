"""Alerts in the log, by mail and by webhook, received by real servers."""

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest
from observe.reports import full_report
from operations.receivers import (
    PASSWORD,
    USER,
    Mailbox,
    Webhook,
    free_port,
    mail_server,
    make_certificate,
    webhook_server,
)

from megatron.extras.operations.monitor import alerts
from megatron.extras.operations.monitor.alerts import (
    Alert,
    Outlets,
    deliver,
    log_line,
    parse_own_line_time,
)
from megatron.observe.log_line import (
    format_training_line,
    parse_log_line,
    parse_validation_log_line,
)

NOON = 1_800_000_000.0
HOUR = 3600.0
STALLED = Alert("stalled", "the log has not grown for 2 hours")
WATCHED = {"stalled"}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "main_log.txt"


@pytest.fixture
def mails() -> Iterator[Mailbox]:
    with mail_server() as mailbox:
        yield mailbox


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook_server() as server:
        yield server


def body(mailbox: Mailbox, number: int = -1) -> str:
    return str(mailbox.messages[number].get_content())


def words(log: Path) -> list[str]:
    """Return the word PULSE, ALERT or RECOVERED of each line of the log."""
    found = []
    for line in log.read_text().splitlines():
        match = re.match(r"\[[^]]*\] (\w+): ", line)
        assert match is not None, line
        found.append(match[1])
    return found


def test_lasting_alert_is_sent_once_again_after_hours_and_when_it_ends(
    log: Path, mails: Mailbox, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALERT_MAIL_TO", "one@site.org, two@site.org")
    monkeypatch.setenv("ALERT_SMTP", "nowhere.invalid:25")
    monkeypatch.setenv("ALERT_WEBHOOK", hook.url)
    outlets = Outlets(log, smtp=mails.address, repeat_hours=3)  # the flag wins
    for hour, sent in ((0, 1), (1, 1), (2, 1), (3, 2), (4, 2)):
        alert = Alert("stalled", f"the log has not grown for {hour + 2} hours")
        assert deliver([alert], outlets, watched=WATCHED, now=NOON + hour * HOUR).troubles == []
        assert len(mails.messages) == sent
        assert len(hook.texts) == sent
    assert words(log) == ["ALERT"] * 5  # the log has it at each check
    first = mails.messages[0]
    assert first["To"] == "one@site.org, two@site.org"
    assert first["Subject"] == "ALERT: the log has not grown for 2 hours"
    assert str(log) in body(mails, 0)
    assert "for 5 hours" in body(mails, 1)
    deliver([], outlets, watched=WATCHED, now=NOON + 5 * HOUR)
    assert "RECOVERED: " in body(mails)
    assert "the log has not grown for 6 hours" in body(mails)
    assert hook.texts[-1] in log.read_text()
    deliver([], outlets, watched=WATCHED, now=NOON + 6 * HOUR)
    assert len(mails.messages) == 3
    assert words(log) == ["ALERT"] * 5 + ["RECOVERED"]


def test_alert_of_an_unwatched_kind_does_not_end(log: Path) -> None:
    deliver([STALLED], Outlets(log), watched=WATCHED, now=NOON)
    deliver([], Outlets(log), watched={"another"}, now=NOON + HOUR)
    assert words(log) == ["ALERT"]
    deliver([], Outlets(log), watched=WATCHED, now=NOON + 2 * HOUR)
    assert words(log) == ["ALERT", "RECOVERED"]


def test_events_are_sent_each_time(log: Path, mails: Mailbox) -> None:
    outlets = Outlets(log, mail_to=("a@site.org",), smtp=mails.address)
    for node in ("n3", "n4"):
        deliver([Alert("array task", f"node {node} is not used any more")], outlets)
    deliver([], outlets)
    assert len(mails.messages) == 2
    assert "n3" in body(mails, 0)
    assert "n4" in body(mails, 1)
    assert words(log) == ["ALERT", "ALERT"]


def test_lasting_alert_is_sent_again_if_the_clock_was_set_back(log: Path, mails: Mailbox) -> None:
    outlets = Outlets(log, mail_to=("a@site.org",), smtp=mails.address)
    for now in (NOON, NOON - 9000 * HOUR):
        deliver([STALLED], outlets, watched=WATCHED, now=now)
    assert len(mails.messages) == 2


def test_pulses_are_never_sent(log: Path, mails: Mailbox) -> None:
    outlets = Outlets(log, mail_to=("a@site.org",), smtp=mails.address)
    delivery = deliver([], outlets, pulses=["tr8-104B is running\nfor 2 hours"], now=NOON)
    assert delivery.lines == [log_line("PULSE", "tr8-104B is running for 2 hours", NOON)]
    assert log.read_text().splitlines() == delivery.lines
    assert mails.messages == []


# A receiver that fails


def test_alerts_are_kept_while_the_mail_server_is_down(
    log: Path, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHAT", hook.url)
    port = free_port()
    outlets = Outlets(log, mail_to=("a@site.org",), smtp=f"127.0.0.1:{port}", webhook="CHAT")
    delivery = deliver([STALLED], outlets, watched=WATCHED, now=NOON)
    assert "127.0.0.1" in delivery.troubles[0]
    assert "tried again" in delivery.troubles[0]
    # The second line reports that the first one was not sent.
    assert words(log) == ["ALERT", "ALERT"]
    # The alert ends before it was sent.
    delivery = deliver([], outlets, watched=WATCHED, now=NOON + HOUR)
    assert len(delivery.troubles) == 1
    with mail_server(port=port) as mailbox:
        assert deliver([], outlets, now=NOON + 2 * HOUR).troubles == []
        assert deliver([], outlets, now=NOON + 3 * HOUR).troubles == []
    (mail,) = mailbox.messages
    text = str(mail.get_content())
    assert log_line("ALERT", STALLED.text, NOON) in text
    assert "RECOVERED" in text
    # The webhook got each line once.
    assert len(hook.texts) == 2


def test_mail_server_that_does_not_answer_times_out(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "_TIMEOUT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        outlets = Outlets(log, mail_to=("a@site.org",), smtp=f"127.0.0.1:{silent.getsockname()[1]}")
        delivery = deliver([STALLED], outlets, watched=WATCHED)
    assert "timed out" in delivery.troubles[0]
    assert json.loads(outlets.memory.read_text())["outbox"]["mail"] == delivery.lines


def test_webhook_that_sends_a_byte_now_and_then_is_abandoned(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read returns in time, but the answer never ends."""
    monkeypatch.setattr(alerts, "_MESSAGE_SECONDS", 1.0)
    over = Event()

    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            while not over.wait(0.05):
                connection.sendall(b"H")

    with socket.create_server(("127.0.0.1", 0)) as slow:
        thread = Thread(target=answer, args=(slow,))
        thread.start()
        monkeypatch.setenv(
            "ALERT_WEBHOOK", f"http://127.0.0.1:{slow.getsockname()[1]}/secret-token"
        )
        started = time.monotonic()
        delivery = deliver([STALLED], Outlets(log), watched=WATCHED)
        assert time.monotonic() - started < 10
        over.set()
        thread.join()
    assert "took longer than 1 s" in delivery.troubles[0]
    assert_no_secret(log, delivery.troubles, "secret-token")
    assert json.loads(Outlets(log).memory.read_text())["outbox"]["webhook"] == delivery.lines


def test_refused_recipients(log: Path, mails: Mailbox) -> None:
    mails.refuse = frozenset({"gone@site.org"})
    some = Outlets(log, mail_to=("a@site.org", "gone@site.org"), smtp=mails.address)
    assert "not for gone@site.org" in deliver([STALLED], some).troubles[0]
    # The others have it, so it is not sent again.
    assert deliver([], some).troubles == []
    assert len(mails.messages) == 1
    none = Outlets(log, mail_to=("gone@site.org",), smtp=mails.address)
    assert "tried again" in deliver([STALLED], none).troubles[0]


@pytest.mark.parametrize("status", [302, 404, 500])
def test_alert_that_a_webhook_refuses_is_sent_again(
    status: int, log: Path, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALERT_WEBHOOK", hook.url)
    hook.status = status
    delivery = deliver([STALLED], Outlets(log), watched=WATCHED)
    assert f"HTTP {status}" in delivery.troubles[0]
    assert_no_secret(log, delivery.troubles, "secret-token")
    hook.status = 200
    deliver([STALLED], Outlets(log), watched=WATCHED)
    assert hook.texts == ["\n".join(delivery.lines)]


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:1/secret-token",
        "http://127.0.0.1:port/secret-token",
        "http://no.invalid/secret-token",
    ],
)
def test_errors_do_not_quote_the_webhook(
    address: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALERT_WEBHOOK", address)
    delivery = deliver([STALLED], Outlets(log))
    assert "the webhook of ALERT_WEBHOOK" in delivery.troubles[0]
    assert_no_secret(log, delivery.troubles, "secret-token")


def assert_no_secret(log: Path, troubles: list[str], secret: str) -> None:
    for text in (*troubles, *(path.read_text() for path in log.parent.iterdir())):
        assert secret not in text


# TLS and passwords


def test_password_is_sent_through_tls(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    certificate = make_certificate(keys)
    monkeypatch.setenv("SMTP_USER", USER)
    monkeypatch.setenv("SMTP_PASSWORD", PASSWORD)
    with mail_server(certificate=certificate, login=True) as mailbox:
        outlets = Outlets(log, mail_to=("a@site.org",), smtp=mailbox.address)
        delivery = deliver([STALLED], outlets, watched=WATCHED)
        assert "no certificate that is trusted here" in delivery.troubles[0]
        assert "SSL_CERT_FILE" in delivery.troubles[0]
        monkeypatch.setenv("SSL_CERT_FILE", str(keys / "public.pem"))
        assert deliver([STALLED], outlets, watched=WATCHED).troubles == []
        assert body(mailbox).startswith(delivery.lines[0])
        monkeypatch.setenv("SMTP_PASSWORD", "wrong horse")
        delivery = deliver([STALLED], outlets)
    assert "SMTPAuthenticationError" in delivery.troubles[0]
    keys.rename(tmp_path.parent / f"{tmp_path.name}-keys")
    assert_no_secret(log, delivery.troubles, "horse")


@pytest.mark.filterwarnings("ignore:Requiring AUTH")
def test_password_is_not_sent_unencrypted(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMTP_USER", USER)
    monkeypatch.setenv("SMTP_PASSWORD", PASSWORD)
    # By its address, this is another host.
    with mail_server(login=True, host="127.0.0.2") as mailbox:
        delivery = deliver([STALLED], Outlets(log, mail_to=("a@site.org",), smtp=mailbox.address))
    assert "not sent in the clear" in delivery.troubles[0]
    with mail_server(login=True) as mailbox:
        assert (
            deliver([], Outlets(log, mail_to=("a@site.org",), smtp=mailbox.address)).troubles == []
        )
    assert len(mailbox.messages) == 1


# Settings, files


@pytest.mark.parametrize(
    ("settings", "flags", "message"),
    [
        ({"ALERT_MAIL_TO": "nobody"}, {}, "'nobody' is not a mail address"),
        ({"ALERT_MAIL_FROM": "me"}, {"mail_to": ("a@site.org",)}, "'me' is not a mail address"),
        ({}, {"mail_to": ("a@site.org",), "smtp": "host:port"}, "'host:port' is not a mail server"),
        ({}, {"mail_to": ("a@site.org",), "smtp": "host:465"}, "use the port with STARTTLS"),
        (
            {"SMTP_USER": "me"},
            {"mail_to": ("a@site.org",)},
            "only one of SMTP_USER and SMTP_PASSWORD",
        ),
        ({}, {"webhook": "CHAT"}, "this environment variable is not set"),
        (
            {},
            {"webhook": "https://chat.org/secret-token"},
            "takes the NAME of an environment variable",
        ),
        ({"ALERT_WEBHOOK": "ftp://secret-token"}, {}, "does not hold the address of a webhook"),
    ],
)
def test_wrong_settings_are_reported_without_an_alert(
    settings: dict[str, str],
    flags: dict[str, object],
    message: str,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    delivery = deliver([], Outlets(log, **flags))  # type: ignore[arg-type]
    assert message in delivery.troubles[0]
    assert message in log.read_text()
    assert_no_secret(log, delivery.troubles, "secret-token")


def test_alert_is_sent_when_a_wrong_setting_was_fixed(log: Path, mails: Mailbox) -> None:
    deliver(
        [STALLED], Outlets(log, mail_to=("a@site.org",), smtp="typo:"), watched=WATCHED, now=NOON
    )
    deliver(
        [STALLED],
        Outlets(log, mail_to=("a@site.org",), smtp=mails.address),
        watched=WATCHED,
        now=NOON + HOUR,
    )
    assert log_line("ALERT", STALLED.text, NOON) in body(mails)


def test_alert_is_sent_if_the_log_cannot_be_written(tmp_path: Path, mails: Mailbox) -> None:
    delivery = deliver(
        [STALLED],
        Outlets(tmp_path / "gone" / "log.txt", mail_to=("a@site.org",), smtp=mails.address),
        watched=WATCHED,
    )
    assert "gone/log.txt cannot be written (No such file or directory)" in delivery.troubles[0]
    assert STALLED.text in delivery.troubles[0]
    assert len(mails.messages) == 1


@pytest.mark.parametrize(
    "damage", ["{", "[1]", '{"lasting": {"stalled": 3}, "outbox": {}}', '{"lasting": {}}']
)
def test_damaged_memory_is_reported_and_replaced(damage: str, log: Path, mails: Mailbox) -> None:
    outlets = Outlets(log, mail_to=("a@site.org",), smtp=mails.address)
    outlets.memory.write_text(damage)
    assert "started from scratch" in deliver([STALLED], outlets, watched=WATCHED).troubles[0]
    assert deliver([STALLED], outlets, watched=WATCHED).troubles == []
    assert len(mails.messages) == 1


def test_memory_that_cannot_be_written_is_reported(log: Path, mails: Mailbox) -> None:
    outlets = Outlets(log, mail_to=("a@site.org",), smtp=mails.address)
    outlets.memory.with_name(outlets.memory.name + ".new").mkdir()
    assert any(
        "cannot be written" in trouble
        for trouble in deliver([STALLED], outlets, watched=WATCHED).troubles
    )
    assert len(mails.messages) == 1


def test_concurrent_tools_keep_the_alerts_of_each_other(log: Path) -> None:
    outlets = Outlets(log, mail_to=("a@site.org",), smtp=f"127.0.0.1:{free_port()}")
    threads = [
        Thread(target=deliver, args=([Alert("event", f"number {n}")], outlets)) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(json.loads(outlets.memory.read_text())["outbox"]["mail"]) == 8


# Lines


def test_lines_of_the_tools_are_not_training_output(log: Path) -> None:
    training = format_training_line(full_report())
    # The trainer has written only a part of its line.
    log.write_text(training[:40])
    deliver([STALLED], Outlets(log), pulses=["tr8-104B is running"], now=NOON)
    started, *own = log.read_text().splitlines()
    assert started == training[:40]
    assert [parse_own_line_time(line) for line in own] == [NOON, NOON]
    for line in own:
        assert parse_log_line(line) is None
        assert parse_validation_log_line(line) is None
    for line in (
        training,
        "[2026-11-21 12:00:00] PULSES: no",
        "PULSE: no",
        "[9999-99-99 12:00:00] PULSE: no",
        "[default0]:" + training,
    ):
        assert parse_own_line_time(line) is None
    assert os.stat(log).st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
