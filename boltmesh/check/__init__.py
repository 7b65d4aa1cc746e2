"""``boltmesh check``: compares a layout with one process, step by step.

``command`` starts the ranks of the layout and then one process; ``parity`` trains, records a trace
in each and combines those of the ranks, and ``differences`` names the first difference. The parity
tests use the same code.
"""
