"""Sources of snapshots: a live job, a recording, another host.

``live`` defines the protocol and reads this host's files. ``replay`` reads a recording, ``ssh``
another host; both use ``frames``, whose first frame is complete and whose others are ``patches``.
The demo is a source in ``tui/demo``.
"""
