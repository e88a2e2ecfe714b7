"""Output of a run: log line, TensorBoard, metrics file, chronicle, timers and throughput.

Its functions take plain numbers. `log_line` has the lines that scripts parse.
"""
