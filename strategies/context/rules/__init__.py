"""Rules for functions that name sizes or positions, or that add up over the sequence.

A rule is called with the function and its arguments, and returns ``NotImplemented`` where the
answer of ``ask`` is right. ``views`` has functions of shapes and slices, ``reductions`` sums and
losses, ``convolutions`` what looks at neighbours.
"""
