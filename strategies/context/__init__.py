"""The context axis: ranks that share a batch divide its sequence.

``axis`` is what the engine calls. ``entries`` finds the modules whose input is cut, and ``verify``
compares the step cut with the step whole. Behind an entry a tensor is a ``CutTensor`` (``cut``):
the shape of the whole outside, this rank's positions inside. ``dispatch`` runs each function on
it: by a rule of ``rules`` or ``attention``, else as the axis analysis says; ``opaque_functions``
brings it those that do not ask tensor subclasses. ``positions`` has the arithmetic of which rank
has which, ``exchange`` communicates.
"""
