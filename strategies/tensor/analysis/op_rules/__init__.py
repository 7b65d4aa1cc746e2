"""Rules for torch's operators: how the dims of their inputs and outputs correspond.

``rule`` has the table of rules and one call of an operator. The families register themselves:
``arithmetic`` (also attention), ``movement`` (views, lookups, split and concatenate). An operator
without a rule needs its inputs whole, and is listed in the plan.
"""
