"""Where samples come from while a run trains.

What writes a data set before a run is in `extras.preparation`.
"""
