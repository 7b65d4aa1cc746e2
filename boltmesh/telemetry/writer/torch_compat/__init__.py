"""The private parts of torch that telemetry needs; nothing else of it uses any.

``hook`` shows every collective to its observers, by the tables of ``operators``. ``flops`` counts
the floating point operations of a step.
"""
