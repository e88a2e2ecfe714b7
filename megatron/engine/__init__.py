"""How a step is executed. `base.py` says what an engine is; everything right of here uses nothing else of it."""
