"""How a model is cut into stages.

``choose`` measures what each unit costs, and takes the user's split or the balanced one within the
memory of the ranks; ``split`` balances the costs (plain arithmetic). ``placement`` says which rank
holds what, ``materialize`` makes a deferred model as far as this rank holds it.
"""
