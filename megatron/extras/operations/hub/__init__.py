"""Synchronisation of a run's records and checkpoints with the Hugging Face Hub.

`push` compares and sends, `checkpoints` sends checkpoints, and `client` makes the requests.
`inside` ensures that only files of the named folder are published.
"""
