"""Linear and Embedding layers too large to be gathered at once, run tile by tile.

``plan`` divides the rows of a weight into tiles (arithmetic, no torch). ``apply`` finds the large
layers of a unit, replaces their forward, and computes with tiles: it gathers those of a weight one
after the other and reduces its gradient. ``logits`` computes a loss from logits in tiles.

``data_parallel/fully_shard.py`` calls ``apply_tiling`` before it shards a unit, if the strategy has
``tile_linear_bytes``. Source: ZeRO-Infinity, Rajbhandari et al. 2021, memory-centric tiling,
https://arxiv.org/abs/2104.07857
"""
