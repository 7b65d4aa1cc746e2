"""Findings: what limits or stops a job, one module for each kind of reason.

``ends`` (failed, crashed, stalled, loss), ``limits`` (memory, bytes), ``waits`` (input, offload,
communication, stragglers), ``pipeline`` (bubble). ``finding`` is the common type; docs/diagnosis.md
lists the thresholds.
"""
