"""Jobs on other hosts, over the user's own ssh.

``remote`` builds the command, runs one ssh process and explains its errors. ``hosts`` keeps a job
through lost connections, merges one that several hosts run, and gets the hosts of a job from SLURM.
"""
