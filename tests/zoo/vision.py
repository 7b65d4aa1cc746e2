"""Declares the operators of torchvision that it needs to be imported; imported before Lightning.

Its wheels of PyPI are built for CUDA and cannot load them beside a torch for the CPU. No entry of
the zoo calls one: images are augmented before a step, and models are made of torch's layers.
"""

import torch

LIBRARY = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
