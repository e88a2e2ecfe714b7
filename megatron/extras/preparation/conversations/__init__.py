"""Conversations to indexed data whose tokens say whether they count in the loss.

`rows` reads and checks them, `marks` finds what counts, and `build` writes the data set.
"""
