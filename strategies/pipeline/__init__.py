"""Pipeline parallelism: stages of one model on several ranks, fed with parts of each batch."""
