"""Folders of checkpoints, on disks and on file systems of fsspec. Plain Python, without torch.

``folder`` has ``folder_at``, which makes a ``Folder`` (to read) or a ``Draft`` (to write) from a
path or an address. ``addresses`` distinguishes paths of the operating system from addresses of
fsspec.
"""
