"""PULSE, ALERT and RECOVERED lines in a run's main log. Alerts are also sent by mail and webhook.

Invariant: an alert is in the log before anything is sent. What could not be sent stays in the
memory file, and the next call of any tool sends it. A line, an error or a command line never
contains a secret.

Environment variables hold settings for all tools, so that scripts stay short. A flag overrides its
variable.

    ALERT_MAIL_TO    addresses, separated by spaces or commas
    ALERT_MAIL_FROM  default: this user at this host
    ALERT_SMTP       host:port, default localhost:25
    ALERT_WEBHOOK    address that takes {"text": ...}, as chat servers do
    SMTP_USER, SMTP_PASSWORD    only if the mail server requires them
"""

import contextlib
import getpass
import http.client
import json
import os
import platform
import re
import smtplib
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from email.message import EmailMessage
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from megatron.base import exit_codes
from megatron.base.durable import append_lines, replace_file, without_links
from megatron.base.errors import OperationsError
from megatron.base.file_lock import LockResult, try_lock
from megatron.base.outside_file import load_json
from megatron.base.plain_text import make_plain, print_line, print_to_stderr
from megatron.extras.operations.hub.answers import run_in_thread
from megatron.observe.chronicle import CHRONICLE, append_event
from megatron.plan.rules.finding import Finding, error

_TIMEOUT_SECONDS = 20.0
"""Time limit for each answer of a mail server or webhook."""
_MESSAGE_SECONDS = 60.0
"""Time limit for a complete message.

A server that sends single bytes slowly never exceeds the limit for an answer.
"""
_LOCK_SECONDS = 60.0
"""Longest wait for another tool that holds the lock of the memory file."""
_SUBJECT_CHARACTERS = 150
_TIME = "%Y-%m-%d %H:%M:%S"
_OWN_LINE = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\] (?:PULSE|ALERT|RECOVERED): ")
"""Beginning of a line that these tools wrote, not the training."""


Content = TypeVar("Content")


@dataclass(frozen=True)
class Alert:
    """One thing that a person should know."""

    kind: str
    """Subject of the alert. It identifies the alert, so it is the same at each check."""
    text: str
    """One line. Numbers in it may change from check to check."""


@dataclass(frozen=True)
class Outlets:
    """Destinations of lines. Defaults come from the environment."""

    main_log: Path
    """The run's main log. PULSE, ALERT and RECOVERED lines are appended to it."""
    mail_to: tuple[str, ...] = ()
    """Mail alerts to these addresses. Default: ALERT_MAIL_TO, or no mail."""
    mail_from: str | None = None
    """Sender. Default: ALERT_MAIL_FROM, or this user at this host."""
    smtp: str | None = None
    """Mail server, as host:port. TLS is used if the server offers it. SMTP_USER and SMTP_PASSWORD
    come from the environment. Default: ALERT_SMTP, or localhost:25."""
    webhook: str | None = None
    """Name of the environment variable that holds a webhook's address, which is a secret. Default:
    ALERT_WEBHOOK, if it is set."""
    repeat_hours: float = 24.0
    """An alert that lasts is sent again after this many hours. The log has it at each check."""

    @property
    def memory(self) -> Path:
        """File of what was sent and what is still to be sent.

        All tools that write to this log share it.
        """
        return Path(f"{self.main_log}.alerts.json")


def check_outlets(outlets: Outlets) -> Iterator[Finding]:
    """Check that messages are not repeated all the time."""
    # NaN fails this comparison as well.
    if not outlets.repeat_hours > 0:
        yield error(f"--repeat-hours {outlets.repeat_hours:g} must be above 0")


@dataclass(frozen=True)
class Delivery:
    """Result of a call of `deliver`."""

    lines: list[str]
    """The lines, as they were written to the log."""
    troubles: list[str]
    """What could not be written or sent. It is not lost unless the text reports so."""


@dataclass
class CheckFindings:
    """What one check found."""

    pulses: list[str] = field(default_factory=list)
    """Texts of PULSE lines."""
    alerts: list[Alert] = field(default_factory=list)
    watched: set[str] = field(default_factory=set)
    """Kinds of alerts that were checked. One that is not among `alerts` has ended."""
    troubles: list[str] = field(default_factory=list)
    """What could not be read, examined or written, and why."""

    def watch(self, kind: str) -> str:
        """Note that a kind of alert is checked, and return it."""
        self.watched.add(kind)
        return kind

    def add_alert(self, kind: str, text: str) -> None:
        """Add an alert. Its kind was checked."""
        self.alerts.append(Alert(self.watch(kind), text))

    def deliver(self, outlets: Outlets, runs: Sequence[Path]) -> int:
        """Write, send and print everything.

        Args:
            outlets: Where the lines go.
            runs: Folders of runs, whose chronicles get the alerts.

        Returns:
            The tool's exit code: 0 if all is well, 1 for an alert, 2 for a trouble.
        """
        delivery = deliver(
            self.alerts, outlets, watched=self.watched, pulses=self.pulses, runs=runs
        )
        if delivery.lines:
            print_line("\n".join(delivery.lines))
        troubles = [*self.troubles, *delivery.troubles]
        for trouble in troubles:
            print_to_stderr(f"error: {make_plain(trouble)}")
        if troubles:
            return exit_codes.USER_ERROR
        if self.alerts:
            return exit_codes.FOUND
        return exit_codes.SUCCESS


def deliver(
    alerts: Sequence[Alert],
    outlets: Outlets,
    *,
    watched: Collection[str] = (),
    pulses: Sequence[str] = (),
    runs: Sequence[Path] = (),
    now: float | None = None,
) -> Delivery:
    """Write alerts to the log, and send them by mail and webhook if these are set.

    An error on the way is never raised. It is part of the result, because an operator must see the
    alerts themselves in any case.

    An alert of a kind in `watched` is a state that lasts. It is sent once, and again after
    `repeat_hours`. When the kind is watched and no longer among the alerts, RECOVERED is sent. An
    alert of another kind is an event, and is sent each time.

    Args:
        alerts: What is wrong now.
        outlets: Destinations.
        watched: Kinds of alerts that the caller has checked.
        pulses: Texts of PULSE lines, which are only written to the log.
        runs: The --save folders of runs. Their chronicles get what is sent.
        now: Time of the check, in seconds since the epoch. Default: the present time.
    """
    if now is None:
        now = time.time()
    # A wrong setting is reported now, even if there is nothing to send. Otherwise it would be found
    # with the first alert.
    channels, unsent = _build_channels(outlets, os.environ)
    troubles: list[str] = []
    remark = "; alerts that had been sent are sent again"
    with _lock_memory(outlets.memory, troubles):
        found = read_record(outlets.memory, _AlertMemory.parse, troubles, remark)
        memory = found or _AlertMemory()
        before = asdict(memory)
        changes, due = _format_lines(alerts, watched, memory, outlets.repeat_hours * 3600.0, now)
        lines = [*(log_line("PULSE", text, now) for text in pulses), *changes]
        _append_to_log(outlets.main_log, lines, troubles)
        _record(runs, due, troubles)
        # A channel with a wrong setting is in `channels` too. It keeps its lines until the setting
        # is right.
        if due:
            for name in channels:
                memory.outbox.setdefault(name, []).extend(due)
        # The memory is written before sending. A kill in between may send a line twice, but loses
        # none.
        if asdict(memory) != before:
            _write(outlets.memory, memory, troubles)
        unsent += _send(channels, memory, lambda: _write(outlets.memory, memory, troubles))
    # What was not sent is a line of the log too, for a reader who sees only the log.
    _append_to_log(outlets.main_log, [log_line("ALERT", text, now) for text in unsent], troubles)
    return Delivery(lines, [*dict.fromkeys(troubles), *unsent])


# Lines


def log_line(word: str, text: str, now: float) -> str:
    """Return a line of the log.

    Args:
        word: PULSE, ALERT or RECOVERED.
        text: Text of the line. Line ends in it become spaces.
        now: Seconds since the epoch. The line has the local time.
    """
    return f"[{format_time(now)}] {word}: {make_plain(' '.join(text.split()))}"


def parse_own_line_time(line: str) -> float | None:
    """Return when these tools wrote a line, in seconds since the epoch.

    Returns:
        The time, or None for a line of the training's output.
    """
    match = _OWN_LINE.match(line)
    return None if match is None else parse_local_time(match[1], _TIME)


def parse_local_time(text: str, form: str) -> float | None:
    """Return a local time in seconds since the epoch, or None for any other text, such as N/A."""
    try:
        return time.mktime(time.strptime(text, form))
    # The digits may be no date, as in the month 13.
    except (ValueError, OverflowError):
        return None


def format_time(seconds: float) -> str:
    """Return the local time of `seconds` since the epoch, as the log has it."""
    return time.strftime(_TIME, time.localtime(seconds))


def _append_to_log(log: Path, lines: Sequence[str], troubles: list[str]) -> None:
    """Append lines to the log, or add a trouble."""
    try:
        append_lines(log, lines)
    except OSError as error:
        # The trouble repeats the lines, so that an operator sees them on the screen or in a mail of
        # cron.
        lost = " / ".join(lines)
        troubles.append(
            f"{log} cannot be written ({error.strerror}); its folder must exist and be writable. "
            f"These lines are missing in it: {lost}"
        )


def _record(runs: Sequence[Path], lines: Sequence[str], troubles: list[str]) -> None:
    """Add lines to the chronicles of runs, or add a trouble."""
    for run in runs:
        # A wrong path must not create a folder. The tools report it themselves.
        if not run.is_dir():
            continue
        for line in lines:
            word, _, text = line.partition("] ")[2].partition(": ")
            try:
                # The source tells these events from the warnings of a launch.
                details = {"text": text, "source": "monitor"}
                append_event(run / CHRONICLE, word.lower(), None, details)
            except OSError as error:
                troubles.append(f"{run / CHRONICLE} cannot be written ({error.strerror}): {line}")


# The memory file


@dataclass
class _AlertMemory:
    """Content of the memory file. Its keys are on disk, so they keep their names."""

    lasting: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Kind -> {"text", "since", "told"}. `since` and `told` are seconds since the epoch. `told` is
    the time at which the alert was last sent."""
    outbox: dict[str, list[str]] = field(default_factory=dict)
    """Channel -> lines that are still to be sent."""

    @staticmethod
    def parse(record: Any) -> "_AlertMemory":
        """Check the content of a memory file, and convert it. See `read_record`."""
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


def read_record(
    path: Path, parse: Callable[[Any], Content], troubles: list[str], remark: str = ""
) -> Content | None:
    """Return the content of a small JSON file. None if it is missing or damaged.

    Args:
        path: The file.
        parse: Checks and converts the content. Content of another form raises a ValueError,
            TypeError, KeyError or AttributeError.
        troubles: Gets a line if the file is damaged. The caller starts with an empty record.
        remark: The end of this line, with what that means.
    """
    try:
        record = load_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        troubles.append(f"{path} cannot be read and is started from scratch: {error}{remark}")
        return None
    try:
        return parse(record)
    except (ValueError, TypeError, KeyError, AttributeError):
        troubles.append(f"{path} has an unknown format and is started from scratch{remark}")
        return None


def write_record(path: Path, text: str, troubles: list[str], remark: str) -> None:
    """Replace a small JSON file, or add a trouble that ends with a remark."""
    try:
        replace_file(path, text + "\n")
    except OSError as error:
        troubles.append(f"{path} cannot be written ({error.strerror}){remark}")


def _write(path: Path, memory: _AlertMemory, troubles: list[str]) -> None:
    """Replace the memory file, or add a trouble."""
    remark = "; until then, alerts are sent at each check"
    write_record(path, json.dumps(asdict(memory), indent=1), troubles, remark)


def _format_lines(
    alerts: Sequence[Alert],
    watched: Collection[str],
    memory: _AlertMemory,
    repeat_seconds: float,
    now: float,
) -> tuple[list[str], list[str]]:
    """Format alerts and recoveries, and bring the memory up to date.

    Returns:
        The lines for the log, and those of them that are to be sent.
    """
    lines = []
    due = []
    for alert in alerts:
        line = log_line("ALERT", alert.text, now)
        lines.append(line)
        known = memory.lasting.get(alert.kind)
        # The absolute value matters after a clock was set back. Otherwise the alert would be silent
        # until the clock reaches `told` again.
        if alert.kind not in watched or known is None or abs(now - known["told"]) >= repeat_seconds:
            due.append(line)
            sent_at = now
        else:
            sent_at = known["told"]
        if alert.kind in watched:
            memory.lasting[alert.kind] = {
                "text": alert.text,
                "since": known["since"] if known else now,
                "told": sent_at,
            }
    present = {alert.kind for alert in alerts}
    # Only watched kinds can recover. The memory also has kinds of other tools, which were not
    # checked by this caller.
    for kind in [kind for kind in memory.lasting if kind in watched and kind not in present]:
        ended = memory.lasting.pop(kind)
        text = f"no longer true: {ended['text']} (since {format_time(ended['since'])})"
        line = log_line("RECOVERED", text, now)
        lines.append(line)
        due.append(line)
    return lines, due


@contextlib.contextmanager
def _lock_memory(memory: Path, troubles: list[str]) -> Iterator[None]:
    """Hold the lock of a memory file, if that is possible within a time limit.

    Without it, two tools that write to one log at the same time would overwrite each other's
    memory. An alert without the lock is better than no alert, so the caller continues in any case.
    """
    lock: IO[str] | None = None
    try:
        lock = open(  # noqa: SIM115
            memory.with_name(f".{memory.name}.lock"), "a", opener=without_links
        )
        deadline = time.monotonic() + _LOCK_SECONDS
        # A blocking `flock` has no time limit, so the lock is polled.
        while try_lock(lock.fileno(), Path(lock.name)) is LockResult.TAKEN:
            if time.monotonic() > deadline:
                troubles.append(
                    f"another tool has held {lock.name} for {_LOCK_SECONDS:.0f} s; continued "
                    "without the lock"
                )
                break
            time.sleep(0.1)
    # Some file systems have no locks. A folder that cannot be written is reported by `_write`.
    except OSError:
        pass
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


# Channels


class _Channel(Protocol):
    """A way to send lines from this machine to people."""

    def send(self, lines: Sequence[str]) -> str | None:
        """Send lines as one message.

        Returns:
            What went wrong although the message was accepted, or None.

        Raises:
            OperationsError: The message was not accepted. The text contains no secret.
        """


def _send(
    channels: Mapping[str, _Channel | None], memory: _AlertMemory, sent: Callable[[], None]
) -> list[str]:
    """Send one message on each channel, with all lines that wait for it.

    Args:
        channels: Name -> channel, or None if its setting is wrong.
        memory: Its outbox is emptied.
        sent: Called after each message. It writes the memory, so that a kill before the next
            message does not send this one again.

    Returns:
        What went wrong.
    """
    troubles = []
    for name, channel in channels.items():
        lines = memory.outbox.get(name, [])
        if channel is None or not lines:
            continue
        try:
            remark = _send_within_limit(name, channel, lines)
        except OperationsError as error:
            troubles.append(
                f"{len(lines)} of these lines were not sent and are tried again at the next check: "
                f"{error}"
            )
            continue
        if remark is not None:
            troubles.append(remark)
        memory.outbox[name] = []
        sent()
    return troubles


def _send_within_limit(name: str, channel: _Channel, lines: Sequence[str]) -> str | None:
    """Send lines as one message, within _MESSAGE_SECONDS. See `_Channel.send`.

    Raises:
        OperationsError: The message was not accepted, or not in time.
    """
    # Neither urllib nor smtplib can limit the time of a complete exchange. The tool does not wait
    # for a daemon thread when it ends.
    try:
        return run_in_thread(lambda: channel.send(lines), _MESSAGE_SECONDS, f"alert by {name}")
    except TimeoutError:
        raise OperationsError(f"the {name} took longer than {_MESSAGE_SECONDS:g} s") from None


def _build_channels(
    outlets: Outlets, environment: Mapping[str, str]
) -> tuple[dict[str, _Channel | None], list[str]]:
    """Build the channels that the settings ask for.

    Returns:
        Name -> channel, or None if its setting is wrong, and one line for each wrong setting.
    """
    channels: dict[str, _Channel | None] = {}
    troubles = []
    for name, make in (("mail", _build_mail), ("webhook", _build_webhook)):
        try:
            channel: _Channel | None = make(outlets, environment)
            if channel is not None:
                channels[name] = channel
        except OperationsError as error:
            channels[name] = None
            troubles.append(str(error))
    return channels, troubles


@dataclass(frozen=True)
class _Mail:
    """Channel that sends mail by SMTP, with STARTTLS if the server offers it."""

    host: str
    port: int
    sender: str
    to: tuple[str, ...]
    log: Path
    """The run's main log, which the mail names."""
    user: str | None
    password: str | None = field(repr=False)
    """Password of `user`. It is not part of the repr, which a traceback could print."""

    def send(self, lines: Sequence[str]) -> str | None:
        """Send lines as one mail, see `_Channel.send`."""
        # All errors below are raised `from None`. The original error may quote the password, and a
        # traceback would show it.
        where = f"the mail server {self.host}:{self.port}"
        try:
            refused = self._deliver(self._build_message(lines))
        except ssl.SSLError as error:
            way_out = "set SSL_CERT_FILE to the site's certificates"
            raise OperationsError(
                f"{where} has no certificate that is trusted here: {error.reason}; {way_out}"
            ) from None
        except (OSError, smtplib.SMTPException) as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise OperationsError(
                f"{where} did not accept the message: "
                f"{text.replace(self.password, '***') if self.password else text}"
            ) from None
        # An address or the password is not ASCII. The error may quote it, so only its type is used.
        except ValueError as error:
            raise OperationsError(
                f"the message cannot be sent to {where}: {type(error).__name__}; addresses and "
                "password must be ASCII"
            ) from None
        if refused:
            return f"{where} accepted the message, but not for {', '.join(refused)}; fix --mail-to"
        return None

    def _build_message(self, lines: Sequence[str]) -> EmailMessage:
        """Return a mail whose subject is the first line, and whose body has all of them."""
        message = EmailMessage()
        # The subject has no use for the time at the beginning of the line.
        first = lines[0].split("] ", 1)[-1]
        more = f" (and {len(lines) - 1} more)" * (len(lines) > 1)
        message["Subject"] = first[:_SUBJECT_CHARACTERS] + more
        message["From"] = self.sender
        message["To"] = ", ".join(self.to)
        end = f"Sent by {platform.node()}; the log is {self.log.absolute()}\n"
        message.set_content("\n".join([*lines, "", end]))
        return message

    def _deliver(self, message: EmailMessage) -> list[str]:
        """Send a mail, and return the addresses that the server refused while it took others.

        Raises:
            OperationsError: The server offers no encryption, and a password would be sent.
        """
        with smtplib.SMTP(
            self.host, self.port, local_hostname=platform.node(), timeout=_TIMEOUT_SECONDS
        ) as server:
            server.ehlo()
            encrypted = server.has_extn("starttls")
            if encrypted:
                server.starttls(context=ssl.create_default_context())
                # What the server offered before the encryption is void (RFC 3207). Ask again.
                server.ehlo()
            if self.user is not None and self.password is not None:
                # To this host itself, a password does not pass through a network.
                if not encrypted and self.host not in ("localhost", "127.0.0.1", "::1"):
                    raise OperationsError(
                        f"the mail server {self.host}:{self.port} offers no TLS, and SMTP_PASSWORD "
                        "is not sent in the clear; "
                        "use its port for submission (587), or unset SMTP_USER"
                    )
                server.login(self.user, self.password)
            return list(server.send_message(message))


def _build_mail(outlets: Outlets, environment: Mapping[str, str]) -> _Mail | None:
    """Return the mail channel, or None if no address is set.

    Raises:
        OperationsError: A setting is wrong.
    """
    to = outlets.mail_to or tuple(environment.get("ALERT_MAIL_TO", "").replace(",", " ").split())
    if not to:
        return None
    server = outlets.smtp or environment.get("ALERT_SMTP") or "localhost:25"
    host, colon, number = server.rpartition(":")
    # An IPv6 address is written in brackets, which smtplib does not take.
    host, number = (host.strip("[]"), number) if colon else (server, "25")
    if not host or not number.isdecimal() or not 0 < int(number) < 65536:
        raise OperationsError(
            f"{server!r} is not a mail server; write --smtp (or ALERT_SMTP) as host:port"
        )
    # On port 465 the server waits for TLS while the client waits for a greeting. Without this check
    # every alert would end in a timeout.
    if number == "465":
        raise OperationsError(
            f"{server!r}: TLS from the first byte is not supported; use the port with STARTTLS, "
            "587 or 25"
        )
    user = environment.get("SMTP_USER") or None
    password = environment.get("SMTP_PASSWORD") or None
    if (user is None) != (password is None):
        raise OperationsError("only one of SMTP_USER and SMTP_PASSWORD is set; set both or neither")
    sender = (
        outlets.mail_from
        or environment.get("ALERT_MAIL_FROM")
        or f"{_get_user_name()}@{platform.node()}"
    )
    for address in (*to, sender):
        if not re.fullmatch(r"[^@\s]+@[^@\s]+", address):
            raise OperationsError(
                f"{address!r} is not a mail address; write --mail-to and --mail-from (or "
                "ALERT_MAIL_...) as someone@somewhere"
            )
    return _Mail(host, int(number), sender, to, outlets.main_log, user, password)


def _get_user_name() -> str:
    """Return the name of this user, or the number if there is no name."""
    try:
        return getpass.getuser()
    # Some containers run under a number that /etc/passwd does not list.
    except (OSError, KeyError):
        return f"uid{os.getuid()}"


@dataclass(frozen=True)
class _Webhook:
    """Channel that posts JSON to a chat server."""

    variable: str
    """Environment variable that holds the address. Messages name it, and not the address."""
    address: str = field(repr=False)
    """The address. Whoever knows it can post, so it is a secret."""

    def send(self, lines: Sequence[str]) -> None:
        """Send lines as one post, see `_Channel.send`."""
        body = json.dumps({"text": "\n".join(lines)}).encode()
        # Errors of urllib and http.client quote the address, which is a secret. So only their kind
        # is reported. The error is raised after the handlers, so that none is chained to it.
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
            if isinstance(inner, OSError):
                reason = inner.strerror or type(inner).__name__
            else:
                reason = "no such host or scheme"
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = type(error).__name__
        raise OperationsError(
            f"the webhook of {self.variable} did not accept the message: {reason}"
        )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that refuses redirects.

    A redirected POST would arrive as a GET, without the alert, and would look like a success.
    """

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Return None, so that urllib raises an HTTPError for the redirect."""
        return None


def _build_webhook(outlets: Outlets, environment: Mapping[str, str]) -> _Webhook | None:
    """Return the webhook channel, or None if no address is set.

    Raises:
        OperationsError: The address is missing or wrong, or was given on the command line.
    """
    variable = outlets.webhook or "ALERT_WEBHOOK"
    if "/" in variable or ":" in variable:
        raise OperationsError(
            "--webhook takes the NAME of an environment variable; everybody on this host can read "
            "an address on the command line. Create a new address and put it into a variable"
        )
    address = environment.get(variable)
    if not address and outlets.webhook is None:
        return None
    if not address:
        raise OperationsError(
            f"--webhook {variable}: this environment variable is not set; export it with the "
            "webhook's address"
        )
    if not re.match(r"https?://[^\s/]", address):
        raise OperationsError(
            f"{variable} does not hold the address of a webhook, which begins with https://"
        )
    return _Webhook(variable, address)
