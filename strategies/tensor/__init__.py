"""The tensor axis: one layer's matrices are divided over ranks."""
