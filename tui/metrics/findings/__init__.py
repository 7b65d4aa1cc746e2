"""Findings: conditions that limit or stop a job, one module for each kind of reason.

``ends`` (failed, crashed, stalled, loss), ``limits`` (memory, bytes, busy host), ``waits`` (input,
offload, bubble, communication, experts, stragglers). ``diagnose`` collects them, ``finding`` is the
common type; docs/diagnosis.md lists the thresholds.
"""
