"""Runs a step of a schedule on one rank: computation, messages, and failure on all ranks together.

``runtime`` runs the steps of a run; ``step`` runs one list of actions, with ``stage`` (the
interface of a stage) to compute, ``p2p`` to send and receive, and ``backward`` to differentiate a
stage, as a whole or in two halves. ``handshake`` compares the ranks at the beginning and the end of
a step, ``failure`` ends a step on all ranks, ``timing`` records when each chunk was computed.
"""
