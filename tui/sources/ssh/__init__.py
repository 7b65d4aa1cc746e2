"""Jobs on other hosts, over the user's own ssh.

``source`` keeps a job through lost connections, ``connection`` runs one ssh process, ``remote``
builds its command, ``failure`` explains its errors, ``hosts`` merges a job that several hosts run.
"""
