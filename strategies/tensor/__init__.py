"""The tensor axis: ranks of a host share every layer, each with a part of its matrices.

``axis`` is what the engine calls: it finds, verifies and applies a plan. ``placement`` drives that:
``analysis`` traces one step on fake tensors, ``candidates`` lists the dims that could be divided,
``planning`` selects among them and writes a ``TensorPlan`` (``plan``): ``options`` has the user's
overrides, ``propagation`` follows divided dims through the step, ``sequence`` adds sequence
parallelism. ``verify`` compares the plan with the whole model, block by block (``skip_blocks``).
``runtime`` runs the model by the plan.

``hugging_face`` compares a plan with Hugging Face's own, ``expected_traffic`` counts the bytes that
it moves.
"""
