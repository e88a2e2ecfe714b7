"""Lines, mails and webhooks of alerts, received by real servers."""

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

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

from megatron.observe.log_line import (
    format_training_line,
    parse_log_line,
    parse_validation_log_line,
)
from megatron.operations import alerts
from megatron.operations.alerts import Alert, Outlets, deliver, log_line, parse_own_line_time

NOON = 1_800_000_000.0
HOUR = 3600.0
STALLED = Alert("stalled", "the log has not grown for 2 hours")
WATCHED = {"stalled"}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "main_log.txt"


@pytest.fixture
def mails() -> Iterator[Mailbox]:
    with mail_server() as box:
        yield box


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook_server() as server:
        yield server


def body(box: Mailbox, number: int = -1) -> str:
    return str(box.messages[number].get_content())


def words(log: Path) -> list[str]:
    """PULSE, ALERT or RECOVERED of each line of the log."""
    return [
        match[1] if (match := re.match(r"\[[^]]*\] (\w+): ", line)) else ""
        for line in log.read_text().splitlines()
    ]


def test_an_alert_is_sent_once_then_when_hours_have_passed_then_its_end(
    log: Path, mails: Mailbox, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALERT_MAIL_TO", "one@site.org, two@site.org")
    monkeypatch.setenv("ALERT_SMTP", "nowhere.invalid:25")
    monkeypatch.setenv("ALERT_WEBHOOK", hook.url)
    outlets = Outlets(log, smtp=mails.address, repeat_hours=3)  # the flag wins
    for hour, sent in ((0, 1), (1, 1), (2, 1), (3, 2), (4, 2)):
        alert = Alert("stalled", f"the log has not grown for {hour + 2} hours")
        assert deliver([alert], outlets, watched=WATCHED, now=NOON + hour * HOUR).troubles == []
        assert (len(mails.messages), len(hook.texts)) == (sent, sent)
    assert words(log) == ["ALERT"] * 5  # the log has it at each check
    first = mails.messages[0]
    assert first["To"] == "one@site.org, two@site.org"
    assert first["Subject"] == "ALERT: the log has not grown for 2 hours"
    assert str(log) in body(mails, 0)
    assert "for 5 hours" in body(mails, 1)
    deliver([], outlets, watched=WATCHED, now=NOON + 5 * HOUR)
    assert "RECOVERED: no longer so: the log has not grown for 6 hours" in body(mails)
    assert hook.texts[-1] in log.read_text()
    deliver([], outlets, watched=WATCHED, now=NOON + 6 * HOUR)
    assert (len(mails.messages), words(log)) == (3, ["ALERT"] * 5 + ["RECOVERED"])


def test_what_was_not_looked_at_does_not_end(log: Path) -> None:
    deliver([STALLED], Outlets(log), watched=WATCHED, now=NOON)
    deliver([], Outlets(log), watched={"another"}, now=NOON + HOUR)
    assert words(log) == ["ALERT"]
    deliver([], Outlets(log), watched=WATCHED, now=NOON + 2 * HOUR)
    assert words(log) == ["ALERT", "RECOVERED"]


def test_events_are_sent_each_time(log: Path, mails: Mailbox) -> None:
    outlets = Outlets(log, mail_to=("a@site.org",), smtp=mails.address)
    for node in ("n3", "n4"):
        deliver([Alert("element", f"node {node} is not used any more")], outlets)
    deliver([], outlets)
    assert ["n3" in body(mails, 0), "n4" in body(mails, 1)] == [True, True]
    assert (len(mails.messages), words(log)) == (2, ["ALERT", "ALERT"])


def test_a_clock_that_was_set_back_does_not_silence(log: Path, mails: Mailbox) -> None:
    outlets = Outlets(log, mail_to=("a@site.org",), smtp=mails.address)
    for now in (NOON, NOON - 9000 * HOUR):
        deliver([STALLED], outlets, watched=WATCHED, now=now)
    assert len(mails.messages) == 2


def test_pulses_are_never_sent(log: Path, mails: Mailbox) -> None:
    outlets = Outlets(log, mail_to=("a@site.org",), smtp=mails.address)
    told = deliver([], outlets, pulses=["tr8-104B is running\nfor 2 hours"], now=NOON)
    assert told.lines == [log_line("PULSE", "tr8-104B is running for 2 hours", NOON)]
    assert (log.read_text().splitlines(), mails.messages) == (told.lines, [])


# A receiver that fails


def test_a_mail_server_that_is_down_loses_nothing(
    log: Path, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHAT", hook.url)
    port = free_port()
    outlets = Outlets(log, mail_to=("a@site.org",), smtp=f"127.0.0.1:{port}", webhook="CHAT")
    told = deliver([STALLED], outlets, watched=WATCHED, now=NOON)
    assert "127.0.0.1" in told.troubles[0]
    assert "tried again" in told.troubles[0]
    assert words(log) == ["ALERT", "ALERT"]  # the second tells that it was not sent
    told = deliver(
        [], outlets, watched=WATCHED, now=NOON + HOUR
    )  # it ends before anybody heard of it
    assert len(told.troubles) == 1
    with mail_server(port=port) as box:
        assert deliver([], outlets, now=NOON + 2 * HOUR).troubles == []
        assert deliver([], outlets, now=NOON + 3 * HOUR).troubles == []
    (mail,) = box.messages
    text = str(mail.get_content())
    assert log_line("ALERT", STALLED.text, NOON) in text
    assert "RECOVERED" in text
    assert len(hook.texts) == 2  # got each line once


def test_a_mail_server_that_does_not_answer_is_left(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "_TIMEOUT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        outlets = Outlets(log, mail_to=("a@site.org",), smtp=f"127.0.0.1:{silent.getsockname()[1]}")
        told = deliver([STALLED], outlets, watched=WATCHED)
    assert "timed out" in told.troubles[0]
    assert json.loads(outlets.memory.read_text())["outbox"]["mail"] == told.lines


def test_refused_recipients(log: Path, mails: Mailbox) -> None:
    mails.refuse = frozenset({"gone@site.org"})
    some = Outlets(log, mail_to=("a@site.org", "gone@site.org"), smtp=mails.address)
    assert "not for gone@site.org" in deliver([STALLED], some).troubles[0]
    assert deliver([], some).troubles == []  # the others have it: not sent again
    assert len(mails.messages) == 1
    none = Outlets(log, mail_to=("gone@site.org",), smtp=mails.address)
    assert "tried again" in deliver([STALLED], none).troubles[0]


@pytest.mark.parametrize("status", [302, 404, 500])
def test_a_webhook_that_refuses_is_asked_again(
    status: int, log: Path, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALERT_WEBHOOK", hook.url)
    hook.status = status
    told = deliver([STALLED], Outlets(log), watched=WATCHED)
    assert f"HTTP {status}" in told.troubles[0]
    assert_no_secret(log, told.troubles, "secret-token")
    hook.status = 200
    deliver([STALLED], Outlets(log), watched=WATCHED)
    assert hook.texts == ["\n".join(told.lines)]


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
    told = deliver([STALLED], Outlets(log))
    assert "the webhook of ALERT_WEBHOOK did not take it" in told.troubles[0]
    assert_no_secret(log, told.troubles, "secret-token")


def assert_no_secret(log: Path, troubles: list[str], secret: str) -> None:
    for text in (*troubles, *(path.read_text() for path in log.parent.iterdir())):
        assert secret not in text


# TLS and passwords


def test_the_password_goes_through_tls(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    certificate = make_certificate(keys)
    monkeypatch.setenv("SMTP_USER", USER)
    monkeypatch.setenv("SMTP_PASSWORD", PASSWORD)
    with mail_server(certificate=certificate, login=True) as box:
        outlets = Outlets(log, mail_to=("a@site.org",), smtp=box.address)
        told = deliver([STALLED], outlets, watched=WATCHED)
        assert "no certificate that is trusted here" in told.troubles[0]  # nobody vouches for it
        assert "SSL_CERT_FILE" in told.troubles[0]
        monkeypatch.setenv("SSL_CERT_FILE", str(keys / "public.pem"))
        assert deliver([STALLED], outlets, watched=WATCHED).troubles == []
        assert body(box).startswith(told.lines[0])
        monkeypatch.setenv("SMTP_PASSWORD", "wrong horse")
        told = deliver([STALLED], outlets)
    assert "SMTPAuthenticationError" in told.troubles[0]
    keys.rename(tmp_path.parent / f"{tmp_path.name}-keys")
    assert_no_secret(log, told.troubles, "horse")


@pytest.mark.filterwarnings("ignore:Requiring AUTH")
def test_no_password_in_the_clear(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMTP_USER", USER)
    monkeypatch.setenv("SMTP_PASSWORD", PASSWORD)
    with mail_server(login=True, host="127.0.0.2") as box:  # not this host, as far as its name says
        told = deliver([STALLED], Outlets(log, mail_to=("a@site.org",), smtp=box.address))
    assert "not sent in the clear" in told.troubles[0]
    with mail_server(login=True) as box:
        assert deliver([], Outlets(log, mail_to=("a@site.org",), smtp=box.address)).troubles == []
    assert len(box.messages) == 1


# Settings, files


@pytest.mark.parametrize(
    ("settings", "flags", "message"),
    [
        ({"ALERT_MAIL_TO": "nobody"}, {}, "'nobody' is no mail address"),
        ({"ALERT_MAIL_FROM": "me"}, {"mail_to": ("a@site.org",)}, "'me' is no mail address"),
        ({}, {"mail_to": ("a@site.org",), "smtp": "host:port"}, "'host:port' is no mail server"),
        ({}, {"mail_to": ("a@site.org",), "smtp": "host:465"}, "use the port with STARTTLS"),
        ({"SMTP_USER": "me"}, {"mail_to": ("a@site.org",)}, "only one is set"),
        ({}, {"webhook": "CHAT"}, "there is no such environment variable"),
        (
            {},
            {"webhook": "https://chat.org/secret-token"},
            "takes the NAME of an environment variable",
        ),
        ({"ALERT_WEBHOOK": "ftp://secret-token"}, {}, "is no address of a webhook"),
    ],
)
def test_wrong_settings_are_told_before_they_are_needed(
    settings: dict[str, str],
    flags: dict[str, object],
    message: str,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    told = deliver([], Outlets(log, **flags))  # type: ignore[arg-type]
    assert message in told.troubles[0]
    assert message in log.read_text()
    assert_no_secret(log, told.troubles, "secret-token")


def test_an_alert_waits_for_a_setting_to_be_mended(log: Path, mails: Mailbox) -> None:
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


def test_a_log_that_cannot_be_written_is_no_reason_to_be_silent(
    tmp_path: Path, mails: Mailbox
) -> None:
    told = deliver(
        [STALLED],
        Outlets(tmp_path / "gone" / "log.txt", mail_to=("a@site.org",), smtp=mails.address),
        watched=WATCHED,
    )
    assert "gone/log.txt cannot be written (No such file or directory)" in told.troubles[0]
    assert STALLED.text in told.troubles[0]
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


def test_memory_that_cannot_be_written_is_told(log: Path, mails: Mailbox) -> None:
    outlets = Outlets(log, mail_to=("a@site.org",), smtp=mails.address)
    outlets.memory.with_name(outlets.memory.name + ".new").mkdir()
    assert any(
        "cannot be written" in trouble
        for trouble in deliver([STALLED], outlets, watched=WATCHED).troubles
    )
    assert len(mails.messages) == 1


def test_tools_that_tell_at_the_same_moment_keep_each_others_alerts(log: Path) -> None:
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


def test_own_lines_are_no_training_output(log: Path) -> None:
    training = format_training_line(full_report())
    log.write_text(training[:40])  # the trainer is in the middle of a line
    deliver([STALLED], Outlets(log), pulses=["tr8-104B is running"], now=NOON)
    started, *own = log.read_text().splitlines()
    assert started == training[:40]
    assert [parse_own_line_time(line) for line in own] == [NOON, NOON]
    assert [parse_log_line(line) or parse_validation_log_line(line) for line in own] == [None, None]
    for line in (
        training,
        "[2026-11-21 12:00:00] PULSES: no",
        "PULSE: no",
        "[9999-99-99 12:00:00] PULSE: no",
        "[default0]:" + training,
    ):
        assert parse_own_line_time(line) is None
    assert oct(os.stat(log).st_mode & 0o777) == oct(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
