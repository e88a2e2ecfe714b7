"""Output of a run: log line, TensorBoard, metrics file, emissions, timers and throughput."""
