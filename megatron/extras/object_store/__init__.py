"""Checkpoints on object stores such as S3: `--save s3://bucket/run`, see docs/object_stores.md.

`objects.py` has the requests to a store, `writer.py` the two objects that
decide who writes and what is visible, `mirror.py` the copy of small files in a local
folder, `store.py` what a run calls, and `addresses.py` what the tools call.
"""
