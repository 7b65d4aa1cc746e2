"""Where checkpoints lie that are folders: on a file system of the system's, or of fsspec's.

Plain Python, without torch. What is read is a ``Folder``, what is being written a ``Draft``; both
are made by ``folder_at`` from a path or an address.
"""
