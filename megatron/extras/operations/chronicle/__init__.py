"""The report of a run: what its files say about it, as text and as a page.

`records` reads events, `history` reads all files, `events` and `goodput` interpret them, and
`summary`, `charts` and `page` make the report. `goodput_meter` measures while the run trains.
"""
