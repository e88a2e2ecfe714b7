"""Checkpoints on object stores such as S3: `--save s3://bucket/run`, see docs/object_stores.md.

`objects.py` has the requests to a store, `root_object.py` the object that makes checkpoints
visible, `store_lease.py` the lease of an address, `mirror.py` the copy of small files in a local
folder, `store.py` what a run calls, and `addresses.py` what the tools call.
"""
