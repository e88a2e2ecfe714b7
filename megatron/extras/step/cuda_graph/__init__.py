"""Forward and backward passes of microbatches as CUDA graphs, for --cuda-graph.

`extras/step/engines.py` adds them to an engine. `captured_runner.py` decides when a graph is
recorded, and when it is repeated. `graph_recorder.py` records on a GPU.
"""
