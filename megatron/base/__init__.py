"""What every package may use, and what is not about training.

`errors` has the errors that a user can fix. `durable` writes files that survive a power cut.
`plain_text` prints lines without control characters of other sources, and writes counts and sizes.
`exit_codes` has the exit codes of all commands.
`error_report` has the report of each rank about the error that ended it.
"""
