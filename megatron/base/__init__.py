"""What every package may use, and what is not about training.

`errors` has the errors that a user can fix. `durable` writes files that survive a power cut.
`close_names` finds the name that a user probably meant.
`plain_text` prints lines without control characters of other sources.
`exit_codes` has the exit codes of all commands.
`error_report` has the report of each rank about the error that ended it.
"""
