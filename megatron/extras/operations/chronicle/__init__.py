"""The report of a run: what its files say about it, as text and as a page.

`history` reads the files, `events` and `goodput` interpret them, and `summary`, `charts` and `page`
make the report. `goodput_meter` measures while the run trains.
"""
