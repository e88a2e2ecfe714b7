"""Environment variables of alerts. Tests remove them, so that no test sends mail to a person."""

NAMES = (
    "ALERT_MAIL_TO",
    "ALERT_MAIL_FROM",
    "ALERT_SMTP",
    "ALERT_WEBHOOK",
    "SMTP_USER",
    "SMTP_PASSWORD",
)
