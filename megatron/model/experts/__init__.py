"""Mixtures of experts: the router, its losses, the way of a token to its experts, and the layer.

Start with `layer`. `routing` chooses experts, `dispatch` moves tokens, and `grouped` multiplies.
"""
