"""What the environment may say of alerts: taken away before a test, so that no test writes to a person."""

NAMES = (
    "ALERT_MAIL_TO",
    "ALERT_MAIL_FROM",
    "ALERT_SMTP",
    "ALERT_WEBHOOK",
    "SMTP_USER",
    "SMTP_PASSWORD",
)
