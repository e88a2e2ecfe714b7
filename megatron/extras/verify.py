"""The old place of the verification's launches, for scripts that import them from here.

They are in `megatron.extras.planner.verify`.
"""

from megatron.extras.planner.verify import launching

__all__ = ("launching",)
