"""Names of the columns of the table; without torch, for the command line."""

NAMES = ("ddp", "zero1", "zero3", "zero3_cpu", "zero3_nvme", "gpipe", "1f1b", "interleaved",
         "tensor", "3d", "context")  # fmt: skip
