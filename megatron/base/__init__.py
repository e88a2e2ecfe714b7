"""What every package may use, and what is not about training.

`errors` has the errors that a user can fix. `durable` writes files that survive a power cut.
`standard_streams` replaces standard output and error by streams whose writes never raise.
`error_report` has the report of each rank about the error that ended it.
"""
