"""Chat templates: text of a conversation, as a model reads it.

Invariant: a template is foreign code. It is rendered in a sandbox, within limits of time and size.
"""
