"""PULSE, ALERT and RECOVERED lines in a run's main log; alerts also by mail and webhook.

Invariant: an alert is in the log before anything is sent, and what could not be sent stays in the memory file and is sent by the
next call of whichever tool. No secret is ever part of a line, an error or a command line.

Settings are shared by environment variables, so that scripts stay short; flags win:

    ALERT_MAIL_TO    addresses, apart by spaces or commas
    ALERT_MAIL_FROM  default: this user at this host
    ALERT_SMTP       host:port, default localhost:25
    ALERT_WEBHOOK    address that takes {"text": ...}, as chat servers do
    SMTP_USER, SMTP_PASSWORD    only where the mail server asks for them
"""

import contextlib
import fcntl
import getpass
import http.client
import json
import os
import platform
import re
import smtplib
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from email.message import EmailMessage
from pathlib import Path
from typing import IO, Any, Protocol

from megatron.durable import append_lines, replace_file
from megatron.errors import OperationsError

_TIMEOUT_SECONDS = 20.0
"""Of a mail server or webhook that does not answer."""
_LOCK_SECONDS = 60.0
_SUBJECT_CHARACTERS = 150
_TIME = "%Y-%m-%d %H:%M:%S"
_OWN_LINE = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\] (?:PULSE|ALERT|RECOVERED): ")


@dataclass(frozen=True)
class Alert:
    """One thing that a person should know."""

    kind: str
    """What it is about, the same at each check: by this it is known again."""
    text: str
    """One line; numbers in it may change from check to check."""


@dataclass(frozen=True)
class Outlets:
    """Where lines go. What is left out comes from the environment."""

    main_log: Path
    """The run's main log: PULSE, ALERT and RECOVERED lines are appended to it."""
    mail_to: tuple[str, ...] = ()
    """Mail alerts to these addresses. Default: ALERT_MAIL_TO, or no mail."""
    mail_from: str | None = None
    """Sender. Default: ALERT_MAIL_FROM, or this user at this host."""
    smtp: str | None = None
    """Mail server, as host:port; TLS where it is offered, SMTP_USER and SMTP_PASSWORD from the environment. Default: ALERT_SMTP, or
    localhost:25."""
    webhook: str | None = None
    """Name of the environment variable that holds a webhook's address (which is a secret). Default: ALERT_WEBHOOK, if it is set."""
    repeat_hours: float = 24.0
    """An alert that goes on is sent again after so many hours. The log has it at each check."""

    @property
    def memory(self) -> Path:
        """What was sent, and what is still to be sent; shared by all tools that tell this log."""
        return Path(f"{self.main_log}.alerts.json")


@dataclass(frozen=True)
class Delivery:
    lines: list[str]
    """What was told, as it stands in the log."""
    troubles: list[str]
    """What could not be written or sent; nothing of it is lost unless it says so."""

    def report(self, others: Sequence[str], *, alert: bool) -> int:
        """Print lines and troubles (`others`: the tool's own). Returns its exit code: 0 all is well, 1 alert, 2 trouble."""
        if self.lines:
            print("\n".join(self.lines))
        troubles = [*others, *self.troubles]
        for trouble in troubles:
            print(f"error: {trouble}", file=sys.stderr)
        return 2 if troubles else 1 if alert else 0


def deliver(
    alerts: Sequence[Alert],
    outlets: Outlets,
    *,
    watched: Collection[str] = (),
    pulses: Sequence[str] = (),
    now: float | None = None,
) -> Delivery:
    """Tell alerts: in the log always, by mail and webhook where these are set. Never raises for what fails on the way.

    `watched` names the kinds that the caller has looked at. An alert of such a kind is a state that lasts: it is sent once, again
    after `repeat_hours`, and RECOVERED is told when the kind is watched and no longer among the alerts. An alert of another kind
    is an event, sent each time.
    """
    now = time.time() if now is None else now
    channels, unsent = _build_channels(outlets, os.environ)
    troubles: list[str] = []
    with _lock_memory(outlets.memory, troubles):
        memory = _read(outlets.memory, troubles)
        before = asdict(memory)
        told, due = _format_lines(alerts, watched, memory, outlets.repeat_hours * 3600.0, now)
        lines = [*(log_line("PULSE", text, now) for text in pulses), *told]
        _append_to_log(outlets.main_log, lines, troubles)
        for name in channels if due else ():
            memory.outbox.setdefault(name, []).extend(due)
        if asdict(memory) != before:
            _write(
                outlets.memory, memory, troubles
            )  # before sending: a kill in between may send twice, and loses nothing
        unsent += _send(channels, memory, lambda: _write(outlets.memory, memory, troubles))
    _append_to_log(outlets.main_log, [log_line("ALERT", text, now) for text in unsent], troubles)
    return Delivery(lines, [*dict.fromkeys(troubles), *unsent])


# Lines


def log_line(word: str, text: str, now: float) -> str:
    """`word` is PULSE, ALERT or RECOVERED; the time is local."""
    return f"[{format_time(now)}] {word}: {' '.join(text.split())}"


def parse_own_line_time(line: str) -> float | None:
    """When a line of these tools was written (seconds since the epoch); None for training output."""
    match = _OWN_LINE.match(line)
    if match is None:
        return None
    try:
        return time.mktime(time.strptime(match[1], _TIME))
    except (ValueError, OverflowError):
        return None


def format_time(seconds: float) -> str:
    return time.strftime(_TIME, time.localtime(seconds))


def _append_to_log(log: Path, lines: Sequence[str], troubles: list[str]) -> None:
    try:
        append_lines(log, lines)
    except OSError as error:
        lost = " / ".join(lines)
        troubles.append(
            f"{log} cannot be written ({error.strerror}); its folder must be there and writable. Not in it: {lost}"
        )


# What is remembered


@dataclass
class _AlertMemory:
    lasting: dict[str, dict[str, Any]] = field(default_factory=dict)
    """kind -> {"text", "since", "told"}; times in seconds since the epoch."""
    outbox: dict[str, list[str]] = field(default_factory=dict)
    """channel -> lines that are still to be sent."""

    @staticmethod
    def parse(record: Any) -> "_AlertMemory":
        """Raises ValueError, TypeError, KeyError or AttributeError where it is of another shape."""
        lasting = {
            str(kind): {
                "text": str(each["text"]),
                "since": float(each["since"]),
                "told": float(each["told"]),
            }
            for kind, each in record["lasting"].items()
        }
        outbox = {
            str(channel): [str(line) for line in lines]
            for channel, lines in record["outbox"].items()
        }
        return _AlertMemory(lasting, outbox)


def read_record(path: Path) -> Any:
    """A small JSON file's content, None where there is none.

    Raises:
        OperationsError: it cannot be read.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise OperationsError(f"{path} cannot be read and is begun afresh: {error}") from error


def _read(path: Path, troubles: list[str]) -> _AlertMemory:
    try:
        record = read_record(path)
        return _AlertMemory() if record is None else _AlertMemory.parse(record)
    except OperationsError as error:
        troubles.append(f"{error}; alerts that had been sent are sent again")
    except (ValueError, TypeError, KeyError, AttributeError):
        troubles.append(
            f"{path} is not what these tools write and is begun afresh; alerts that had been sent are sent again"
        )
    return _AlertMemory()


def _write(path: Path, memory: _AlertMemory, troubles: list[str]) -> None:
    try:
        replace_file(path, json.dumps(asdict(memory), indent=1) + "\n")
    except OSError as error:
        troubles.append(
            f"{path} cannot be written ({error.strerror}); until it can, alerts are sent at each check"
        )


def _format_lines(
    alerts: Sequence[Alert],
    watched: Collection[str],
    memory: _AlertMemory,
    repeat_seconds: float,
    now: float,
) -> tuple[list[str], list[str]]:
    """(lines for the log, those of them to be sent); brings the memory up to date."""
    lines, due = [], []
    for alert in alerts:
        line = log_line("ALERT", alert.text, now)
        lines.append(line)
        known = memory.lasting.get(alert.kind)
        # By its size: a clock that was set back must not silence an alert for years.
        if alert.kind not in watched or known is None or abs(now - known["told"]) >= repeat_seconds:
            due.append(line)
            told = now
        else:
            told = known["told"]
        if alert.kind in watched:
            memory.lasting[alert.kind] = {
                "text": alert.text,
                "since": known["since"] if known else now,
                "told": told,
            }
    present = {alert.kind for alert in alerts}
    for kind in [kind for kind in memory.lasting if kind in watched and kind not in present]:
        ended = memory.lasting.pop(kind)
        line = log_line(
            "RECOVERED", f"no longer so: {ended['text']} (since {format_time(ended['since'])})", now
        )
        lines.append(line)
        due.append(line)
    return lines, due


@contextlib.contextmanager
def _lock_memory(memory: Path, troubles: list[str]) -> Iterator[None]:
    """Two tools that tell one log at the same moment must not overwrite each other's memory."""
    lock: IO[str] | None = None
    try:
        lock = open(memory.with_name(f".{memory.name}.lock"), "a")  # noqa: SIM115
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    troubles.append(
                        f"{lock.name} is held for {_LOCK_SECONDS:.0f} s by another tool; went on without it"
                    )
                    break
                time.sleep(0.1)
    except OSError:
        pass  # a folder that cannot be written is told by who writes to it, and some file systems have no locks
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


# Ways out of the machine


class _Channel(Protocol):
    def send(self, lines: Sequence[str]) -> str | None:
        """Raises OperationsError where it was not taken; returns what went wrong where it was taken all the same."""


def _send(
    channels: Mapping[str, _Channel | None], memory: _AlertMemory, sent: Callable[[], None]
) -> list[str]:
    """One message for all lines of a channel; `sent` is called after each. Returns what went wrong."""
    troubles = []
    for name, channel in channels.items():
        lines = memory.outbox.get(name, [])
        if channel is None or not lines:
            continue
        try:
            remark = channel.send(lines)
        except OperationsError as error:
            troubles.append(
                f"{len(lines)} of these lines not sent, tried again at the next check: {error}"
            )
            continue
        if remark is not None:
            troubles.append(remark)
        memory.outbox[name] = []
        sent()
    return troubles


def _build_channels(
    outlets: Outlets, environment: Mapping[str, str]
) -> tuple[dict[str, _Channel | None], list[str]]:
    """The channels that are asked for, None where a setting is wrong, and what is wrong: told before an alert needs them."""
    makers: dict[str, Callable[[Outlets, Mapping[str, str]], _Channel | None]] = {
        "mail": _build_mail,
        "webhook": _build_webhook,
    }
    channels: dict[str, _Channel | None] = {}
    troubles = []
    for name, make in makers.items():
        try:
            channel = make(outlets, environment)
        except OperationsError as error:
            channels[name] = None
            troubles.append(str(error))
            continue
        if channel is not None:
            channels[name] = channel
    return channels, troubles


@dataclass(frozen=True)
class _Mail:
    host: str
    port: int
    sender: str
    to: tuple[str, ...]
    log: Path
    user: str | None
    password: str | None = field(repr=False)

    def send(self, lines: Sequence[str]) -> str | None:
        where = f"the mail server {self.host}:{self.port}"
        try:
            refused = self._deliver(self._build_message(lines))
        except ssl.SSLError as error:
            way_out = "name the site's certificates by SSL_CERT_FILE"
            raise OperationsError(
                f"{where} has no certificate that is trusted here: {error.reason}; {way_out}"
            ) from None
        except (OSError, smtplib.SMTPException) as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise OperationsError(
                f"{where} did not take it: {text.replace(self.password, '***') if self.password else text}"
            ) from None
        except (
            ValueError
        ) as error:  # what is not ASCII in an address or password; the text may quote it
            raise OperationsError(
                f"{where} cannot be told: {type(error).__name__}; addresses and password must be ASCII"
            ) from None
        return (
            f"{where} took it, but not for {', '.join(refused)}; mend --mail-to"
            if refused
            else None
        )

    def _build_message(self, lines: Sequence[str]) -> EmailMessage:
        message = EmailMessage()
        first = lines[0].split("] ", 1)[-1]
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        message["Subject"] = first[:_SUBJECT_CHARACTERS] + more
        message["From"] = self.sender
        message["To"] = ", ".join(self.to)
        message.set_content(
            "\n".join([*lines, "", f"Told by {platform.node()}; the log is {self.log.absolute()}"])
            + "\n"
        )
        return message

    def _deliver(self, message: EmailMessage) -> list[str]:
        """Returns the addresses that were refused while others were not."""
        with smtplib.SMTP(
            self.host, self.port, local_hostname=platform.node(), timeout=_TIMEOUT_SECONDS
        ) as server:
            server.ehlo()
            encrypted = server.has_extn("starttls")
            if encrypted:
                server.starttls(context=ssl.create_default_context())
                server.ehlo()
            if self.user is not None and self.password is not None:
                if not encrypted and self.host not in ("localhost", "127.0.0.1", "::1"):
                    raise OperationsError(
                        f"the mail server {self.host}:{self.port} offers no TLS, and SMTP_PASSWORD is not sent in the clear; "
                        "use its port for submission (587), or unset SMTP_USER"
                    )
                server.login(self.user, self.password)
            return list(server.send_message(message))


def _build_mail(outlets: Outlets, environment: Mapping[str, str]) -> _Mail | None:
    to = outlets.mail_to or tuple(environment.get("ALERT_MAIL_TO", "").replace(",", " ").split())
    if not to:
        return None
    server = outlets.smtp or environment.get("ALERT_SMTP") or "localhost:25"
    host, colon, number = server.rpartition(":")
    host, number = (host.strip("[]"), number) if colon else (server, "25")
    if not host or not number.isdecimal() or not 0 < int(number) < 65536:
        raise OperationsError(
            f"{server!r} is no mail server; write --smtp (or ALERT_SMTP) as host:port"
        )
    if number == "465":
        raise OperationsError(
            f"{server!r}: TLS from the first byte is not spoken here; use the port with STARTTLS, 587 or 25"
        )
    user, password = environment.get("SMTP_USER") or None, environment.get("SMTP_PASSWORD") or None
    if (user is None) != (password is None):
        raise OperationsError("of SMTP_USER and SMTP_PASSWORD only one is set; set both, or none")
    sender = (
        outlets.mail_from
        or environment.get("ALERT_MAIL_FROM")
        or f"{_get_user_name()}@{platform.node()}"
    )
    for address in (*to, sender):
        if not re.fullmatch(r"[^@\s]+@[^@\s]+", address):
            raise OperationsError(
                f"{address!r} is no mail address; write --mail-to and --mail-from (or ALERT_MAIL_...) as someone@somewhere"
            )
    return _Mail(host, int(number), sender, to, outlets.main_log, user, password)


def _get_user_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in some containers
        return f"uid{os.getuid()}"


@dataclass(frozen=True)
class _Webhook:
    variable: str
    address: str = field(repr=False)

    def send(self, lines: Sequence[str]) -> None:
        """As `_Channel`."""
        body = json.dumps({"text": "\n".join(lines)}).encode()
        # Errors of urllib and http.client quote the address, which is a secret: only their kind is told, and none is chained.
        try:
            request = urllib.request.Request(
                self.address, data=body, headers={"Content-Type": "application/json"}
            )
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=_TIMEOUT_SECONDS):
                return
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code}"
        except urllib.error.URLError as error:
            inner = error.reason
            reason = (
                inner.strerror or type(inner).__name__
                if isinstance(inner, OSError)
                else "no such host or scheme"
            )
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = type(error).__name__
        raise OperationsError(f"the webhook of {self.variable} did not take it: {reason}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would arrive as a GET, without the alert, and look like a success."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _build_webhook(outlets: Outlets, environment: Mapping[str, str]) -> _Webhook | None:
    variable = outlets.webhook or "ALERT_WEBHOOK"
    if "/" in variable or ":" in variable:
        raise OperationsError(
            "--webhook takes the NAME of an environment variable; an address on the command line can be read by everybody on this "
            "host: put it into a variable, and better make a new one"
        )
    address = environment.get(variable)
    if not address and outlets.webhook is None:
        return None
    if not address:
        raise OperationsError(
            f"--webhook {variable}: there is no such environment variable; export it with the webhook's address"
        )
    if not re.match(r"https?://[^\s/]", address):
        raise OperationsError(
            f"what {variable} holds is no address of a webhook; it begins with https://"
        )
    return _Webhook(variable, address)
