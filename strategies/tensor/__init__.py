"""The tensor axis: ranks of a host share every layer, each with a part of its matrices.

``axis`` is what the engine calls: it finds, verifies and applies a plan. ``placement`` drives that:
``analysis`` traces one step on fake tensors, ``candidates`` lists the dims that could be divided,
``planning`` selects among them (with ``overrides`` from the user, ``vocab_experts`` for
vocabularies and experts), ``propagation`` follows divided dims through the step, ``sequence`` adds
sequence parallelism, and ``emit_plan`` writes a ``TensorPlan`` (``plan``). ``verify`` compares the
plan with the whole model, block by block (``backends``, ``skip_blocks``, ``comparison``).
``runtime`` runs the model by the plan.

``plan_report`` shows a plan in tables, ``hugging_face`` compares it with Hugging Face's own,
``expected_traffic`` counts the bytes that it moves.
"""
