"""Cuts a model into stages.

``choose`` measures the cost of each unit, and takes the user's split or a balanced one within the
memory of the ranks; ``split`` balances the costs (plain arithmetic). ``placement`` assigns units,
parameters and buffers to ranks, ``materialize`` makes this rank's part of a deferred model.
"""
