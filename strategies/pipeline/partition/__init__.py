"""How a model is cut into stages.

``cost`` counts or measures what each unit costs, ``split`` balances the costs (plain arithmetic),
``choose`` takes the user's split or the balanced one within the memory of the ranks, ``placement``
says which rank holds what, ``materialize`` makes a deferred model as far as this rank holds it.
"""
