"""The context axis: ranks that share a batch divide its sequence.

``axis`` is what the engine calls. ``entries`` finds the modules whose input is cut, and ``verify``
compares the step cut with the step whole. After an entry a tensor is a ``SeqShard``: the shape of
the whole outside, this rank's positions inside. ``dispatch`` runs each function on it: by a rule
of ``rules`` or ``attention``, else by the axis analysis; ``opaque_functions`` passes it those that
bypass tensor subclasses. ``positions`` computes which rank has which positions, ``exchange``
communicates.
"""
