"""Conversations: their text as a model reads it, and how they share samples.

`template` renders chat templates, and `packed` makes samples.

Invariant: a template is foreign code. It is rendered in a sandbox, within limits of time and size.
"""
